"""Several shards as one batch, where each has the bits that it has alone.

In portable arithmetic, what is computed for an example doesn't depend on how many others there are
(`arithmetic/together`). So small models need not pay for each shard: the shards of a device that
are a node of the canonical tree go through the model at once, and only what sums over examples is
kept apart. Before shards of a size are computed so, they are computed once both ways, and every bit
is compared.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import optree
import torch

from evenstep.arithmetic.together import (
    NotTogetherError,
    add_up,
    computing_together,
    is_of_shards,
    of_shards,
    shards_of,
)
from evenstep.batch import Batch, Cut
from evenstep.batch.rng import ShardRandomness
from evenstep.collectives import TreeSum, tree_plan, tree_sum
from evenstep.collectives.tree import TreePlan
from evenstep.devices import process_wide
from evenstep.replicas import Replica
from evenstep.replicas.replica import changed, same_bits
from evenstep.shard.forward_backward import (
    Leaf,
    ShardWork,
    compute_shard,
    contributions,
    forward_and_backward,
)
from evenstep.shard.loss import Outputs, ShardObjective
from evenstep.shard.partial_sum import PartialSum, add

logger = logging.getLogger("evenstep")

_LARGEST_BYTES = 1 << 24
"""The most memory that the gradients of all shards may take. Large models gain nothing by it: what
a shard costs them is arithmetic."""


class Together:
    """Computes shards at once, as long as that gives the bits of each shard by itself.

    Attributes:
        refused: why shards are computed by themselves; None if they need not be.
    """

    def __init__(self) -> None:
        self.refused: str | None = None
        self._shown = set[Any]()

    def runs(self, replica: Replica, cut: Cut) -> Mapping[int, Sequence[range]]:
        """Return which shards of a batch may be computed at once: by the first, longest first."""
        may = replica.may_accumulate and replica.has_run_backward
        if self.refused is not None or cut.filled == 1 or not (cut.can_join and may):
            return {}
        nbytes = sum(one.nbytes for one in replica.parameters)
        most = _LARGEST_BYTES // max(nbytes, 1)
        return _runs(tree_plan(len(cut.bounds), cut.filled), tuple(cut.bounds), most)

    def compute(
        self,
        replica: Replica,
        works: Sequence[ShardWork],
        cut: Cut,
        take: Callable[[int], Batch],
        *,
        objective: ShardObjective,
        tree: TreeSum[PartialSum],
    ) -> list[Leaf]:
        """Compute shards that are a node of the tree, and put their sum into the tree.

        Args:
            replica: the replica of the calling lane.
            works: the shards' work, without batches.
            cut: the batch.
            take: returns the examples of a shard, in the replica's memory.
            objective: computes a shard's loss as (total, count).
            tree: receives the sum of the shards.

        Returns:
            Each shard's (total, count), detached.
        """
        shards = range(works[0].shard, works[-1].shard + 1)
        kind = len(shards), works[0].examples, _kind_of(objective)
        leaves: list[Leaf] | None = None
        value: PartialSum | None = None
        if kind not in self._shown:
            leaves, value = _one_by_one(replica, works, cut, take, objective)
        if self.refused is None:
            try:
                found = _at_once(replica, works, cut, objective)
            except Exception as error:  # if it is the user's, a shard by itself raises it, too
                replica.put_back_buffers()
                self._refuse(str(error) or type(error).__name__)
            else:
                if value is None or _are_same((leaves, value), found):
                    self._shown.add(kind)
                    leaves, value = found
                else:
                    self._refuse("the bits are not those of each shard by itself")
        if value is None or leaves is None:
            leaves, value = _one_by_one(replica, works, cut, take, objective)
        tree.put(tree.plan.node_of(shards), value)
        return leaves

    def check_again(self) -> None:
        """Compare bits again before the next shards are computed at once."""
        self._shown.clear()

    def _refuse(self, why: str) -> None:
        self.refused = why
        logger.debug("shards are computed one by one: %s", why)


@functools.lru_cache(maxsize=256)
def _runs(
    plan: TreePlan, bounds: Sequence[tuple[int, int]], most: int
) -> Mapping[int, Sequence[range]]:
    found: dict[int, list[range]] = {}
    for span in plan.nodes():
        sizes = {hi - lo for lo, hi in bounds[span.start : span.stop]}
        if 1 < len(span) <= most and len(sizes) == 1:
            found.setdefault(span.start, []).append(span)
    return {first: sorted(spans, key=len, reverse=True) for first, spans in found.items()}


def _one_by_one(
    replica: Replica,
    works: Sequence[ShardWork],
    cut: Cut,
    take: Callable[[int], Batch],
    objective: ShardObjective,
) -> tuple[list[Leaf], PartialSum]:
    shards = range(works[0].shard, works[-1].shard + 1)
    tree = TreeSum[PartialSum](tree_plan(len(cut.bounds), cut.filled, shards), add)
    leaves = []
    for work in works:
        own = work._replace(batch=take(work.shard))
        leaf = compute_shard(replica, own, objective=objective, tree=tree, may_accumulate=False)
        leaves.append(leaf)
    (value,) = tree.take_partials()
    return leaves, value


def _at_once(
    replica: Replica,
    works: Sequence[ShardWork],
    cut: Cut,
    objective: ShardObjective,
) -> tuple[list[Leaf], PartialSum]:
    first, shards = works[0], len(works)
    batch = _joined([cut.views[work.shard] for work in works], cut)
    replica.put_buffers(_copies(one, shards) for one in replica.opening)
    numbers = [ShardRandomness(work.random_seed) for work in works]
    with ShardRandomness(_refuse_state), computing_together(shards, numbers):
        with refused_reads():
            work = first._replace(batch=batch)
            total, count, *outputs = forward_and_backward(replica, work, objective)
        gradients = [parameter.grad for parameter in replica.parameters]
        for parameter in replica.parameters:
            parameter.grad = None
        totals, counts = _numbers(total.detach(), shards), _numbers(count, shards)
    leaves: list[Leaf] = [*zip(totals, counts, strict=True)]
    if outputs:
        each = _outputs_of_each(outputs[0], shards)
        leaves = [(*leaf, own) for leaf, own in zip(leaves, each, strict=True)]
    value = _sum_of_buffers(replica, works)
    value.gradients = add_up(gradients, shards)
    return leaves, value


def _outputs_of_each(outputs: Outputs, shards: int) -> list[Outputs]:
    """Return what the objective has returned for each shard, without its graph."""
    found: list[dict[str, Any]] = [{} for _ in range(shards)]
    for name, value in outputs.items():
        parts = [_of_each(one, shards) for one in (value if isinstance(value, tuple) else (value,))]
        for own, each in zip(found, zip(*parts, strict=True), strict=True):
            copies = tuple(one.clone() if isinstance(one, torch.Tensor) else one for one in each)
            own[name] = copies if isinstance(value, tuple) else copies[0]
    return [*found]


def _copies(opening: torch.Tensor, shards: int) -> torch.Tensor:
    """Return what stands for a buffer of each shard."""
    return of_shards(torch.stack([opening] * shards), shards)


def _sum_of_buffers(replica: Replica, works: Sequence[ShardWork]) -> PartialSum:
    """Return what shards leave in the buffers, added up in the canonical tree."""
    shards = len(works)
    try:
        found = [_of_each(value, shards) for value in replica.values()]
    finally:
        replica.put_back_buffers()
    parts = []
    for number, work in enumerate(works):
        pairs = zip(replica.buffer_names, replica.opening, found, strict=True)
        written = [changed(values[number], opening, name) for name, opening, values in pairs]
        own = written and contributions(replica, work, written)
        weights = (work.examples or 1,)
        parts.append(PartialSum([], own, weights, replica, work.shard, work.shard + 1))
    total = tree_sum(parts, add)
    assert total is not None
    return total


def _of_each(value: Any, shards: int) -> Sequence[Any]:
    is_tensor = isinstance(value, torch.Tensor)
    return shards_of(value.detach(), shards).unbind() if is_tensor else [value] * shards


def _kind_of(objective: Any) -> Any:
    """Return what two objectives of one definition have in common."""
    parts = (objective.func, *objective.args) if hasattr(objective, "func") else (objective,)
    return tuple(getattr(one, "__code__", id(one)) for one in parts)


def _refuse_state() -> int:
    raise NotTogetherError("the state of random numbers is read or set")


def _joined(parts: Sequence[Sequence[torch.Tensor]], cut: Cut) -> Batch:
    """Return what stands for the batches of several shards."""
    joined = []
    for number, tensors in enumerate(zip(*parts, strict=True)):
        if number in cut.shared or any(one.requires_grad for one in tensors):
            raise NotTogetherError("a tensor that is shared, or has a gradient")
        joined.append(of_shards(torch.stack(tensors), len(tensors)))
    return cut.structure.unflatten(joined)


def _numbers(value: Any, shards: int) -> list[Any]:
    """Return the number of each shard."""
    if not isinstance(value, torch.Tensor):
        return [value] * shards
    found: list[Any] = shards_of(value, shards).tolist()
    return found


def _are_same(
    apart: tuple[list[Leaf] | None, PartialSum], together: tuple[list[Leaf], PartialSum]
) -> bool:
    """Whether shards have the same bits together."""
    (leaves, value), (found, other) = apart, together
    assert leaves is not None
    ours, theirs = ([*one.gradients, *one.buffers] for one in (value, other))
    for mine, its in zip(leaves, found, strict=True):
        ours += [*map(_as_tensor, _leaves_of(mine))]
        theirs += [*map(_as_tensor, _leaves_of(its))]
    return len(ours) == len(theirs) and all(map(_is_same, ours, theirs))


def _leaves_of(leaf: Any) -> list[Any]:
    return optree.tree_leaves(leaf)


def _as_tensor(value: Any) -> torch.Tensor:
    """Return a number in float64, where those of float32 and Python's are equal; or a tensor."""
    is_number = not isinstance(value, torch.Tensor) or value.ndim == 0
    return torch.tensor(float(value), dtype=torch.float64) if is_number else value.detach()


def _is_same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else same_bits(one, other)


# ---- reads of a tensor's numbers that pass by torch's operations: they see the first shard's alone

_READERS: list[tuple[Any, str, int]] = [
    *((torch.Tensor, name, 0) for name in ("numpy", "tolist", "__dlpack__")),
    (torch.Tensor, "tensor_split", 1),
    (torch, "tensor_split", 1),
]
"""What has each function, its name, and the place of the argument that it reads by its address.

`Tensor.__array__` calls `numpy`.
"""
_HERE = threading.local()  # .refuses: whether the thread computes several shards at once


@process_wide
@contextmanager
def watched_reads() -> Iterator[None]:
    """Inside `with`, such reads can be refused: the functions are replaced by ones that look."""
    with ExitStack() as replaced:
        for owner, name, place in _READERS:
            replaced.callback(_put_back, owner, name, vars(owner).get(name))
            setattr(owner, name, _looking(getattr(owner, name), place))
        yield


@contextmanager
def refused_reads() -> Iterator[None]:
    """Inside `with`, the calling thread may not read tensors of several shards so.

    Raises:
        NotTogetherError: inside, if it does, and `watched_reads` is open.
    """
    _HERE.refuses = True
    try:
        yield
    finally:
        _HERE.refuses = False


def _looking(read: Callable[..., Any], place: int) -> Callable[..., Any]:
    @functools.wraps(read)
    def look(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()][place : place + 1]
        if getattr(_HERE, "refuses", False) and any(map(is_of_shards, given)):
            raise NotTogetherError(f"{read.__name__}() of a tensor")
        return read(*args, **kwargs)

    return look


def _put_back(owner: Any, name: str, own: Any) -> None:
    if own is None:  # it was its class's before
        delattr(owner, name)
    else:
        setattr(owner, name, own)
