"""Partial sums: what some shards contribute to a step, and how two contributions are added.

A partial sum is the value of a node of the canonical tree. `add` is the only place where gradients
and buffers of different shards meet, so its order of operands is part of the result.

Gradients are added to and divided in place, so each must have memory of its own. Autograd gives a
parameter whatever tensor the last function of its backward pass has returned: perhaps a view of the
memory of another parameter's gradient (in `x + (p.flatten() + q.flatten())`), of a tensor that the
same backward pass has yet to read, or of a buffer that a hook or a custom function keeps. Each
storage counts its users, which shows it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from evenstep.collectives import tree_sum
from evenstep.collectives.table_rows import add_rows, densified
from evenstep.devices import Device
from evenstep.engine import streams
from evenstep.errors import ContractError, EvenstepError
from evenstep.private_torch.tensors import (
    USERS_OF_ONE,
    add_all,
    divide_all,
    handle_of,
    users_of,
    version_of,
)
from evenstep.replicas import JUDGE, Replica
from evenstep.replicas.buffer_rules import RANGE, ranges_of

Tensors: TypeAlias = "list[torch.Tensor | None]"
Add: TypeAlias = "Callable[[PartialSum, PartialSum], PartialSum]"

HALF_PRECISION = (torch.float16, torch.bfloat16)


class AccumulatedTwiceError(EvenstepError):
    """A backward pass has added to one gradient twice, or must not add to a left sum at all.

    A backward pass inside the backward pass does that (recomputed activations with
    `use_reentrant`) if both reach one parameter. Accumulated onto a left sum, the result is
    (left + a) + b instead of left + (a + b); and a gradient that was sent after a is not final.
    Sparse gradients, and objectives that run a backward pass of their own, can't be accumulated
    either. The step is attempted again, and from then on each shard is computed by itself.
    """


@dataclasses.dataclass
class PartialSum:
    """The value of a node of the canonical tree.

    Attributes:
        gradients: for each parameter the sum of the shards' gradients, or None where no shard
            reached the parameter. Sparse gradients are coalesced.
        buffers: for each buffer what its rule adds up: for a mean the sum of weight × value over
            the shards; None where no shard wrote the buffer.
        weights: the number of examples of each shard.
        replica: the replica in whose memory the tensors are.
        lo, hi: the node's shards are [lo, hi).
        is_dense: whether no gradient is sparse, except those of `tables`.
        tables: the numbers of the gradients that are rows for now, and become dense in the root.
        fence: on a GPU, the event to wait for before the tensors are used.
        present: of the root of several processes, for each parameter whether it has a gradient;
            where parameters have owners, `gradients` has only those that this process owns.
    """

    gradients: Tensors
    buffers: Tensors
    weights: tuple[int, ...]
    replica: Replica
    lo: int
    hi: int
    is_dense: bool = True
    tables: frozenset[int] = frozenset()
    fence: Any = None
    present: Sequence[bool] = ()

    @property
    def weight(self) -> int:
        """The number of examples of all its shards."""
        return sum(self.weights)


def add(left: PartialSum, right: PartialSum) -> PartialSum:
    """Return left + right in the memory of `left`, whose tensors are reused."""
    device = left.replica.device
    for value in (left, right):
        if value.fence is not None:
            receive(value, device)
    if right.replica.device.memory != device.memory:
        right = _moved(right, left.replica)
    tables = left.tables | right.tables
    gradients = add_gradients(left.gradients, right.gradients, tables)
    return PartialSum(
        gradients,
        add_buffers(left, right) if left.buffers else [],
        (*left.weights, *right.weights),
        left.replica,
        left.lo,
        right.hi,
        left.is_dense and right.is_dense,
        rows_in(gradients, tables) if tables else tables,
        streams.fence_here(device) if device.is_accelerator else None,
    )


def add_gradients(left: Tensors, right: Tensors, tables: Container[int] = ()) -> Tensors:
    """Return left + right, reusing the memory of `left` where possible; None adds nothing.

    Sparse gradients of `tables`, given by their places, stand for dense ones.
    """
    result = list(left)
    dense: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for number, (ours, theirs) in enumerate(zip(left, right, strict=True)):
        if ours is None or theirs is None:
            result[number] = theirs if ours is None else ours
        elif ours.is_sparse or theirs.is_sparse:
            plus = add_rows if number in tables else _add_sparse
            result[number] = plus(ours, theirs)
        else:
            dense[0].append(ours)
            dense[1].append(theirs)
    if dense[0]:
        add_all(*dense)
    return result


def add_buffers(left: PartialSum, right: PartialSum) -> Tensors:
    """Add what shards left in the buffers, each by its rule."""
    pairs = zip(left.buffers, right.buffers, strict=True)
    return [_add_buffer(number, *pair, left, right) for number, pair in enumerate(pairs)]


def _add_buffer(
    number: int,
    ours: torch.Tensor | None,
    theirs: torch.Tensor | None,
    left: PartialSum,
    right: PartialSum,
) -> torch.Tensor | None:
    replica = left.replica
    rule, opening = replica.rules[number], replica.opening[number]
    if ours is None and theirs is None:
        return None
    if is_averaged(opening, rule):  # a side that did not write it contributes the opening value
        addend = _unwritten(opening, right) if theirs is None else theirs
        return (_unwritten(opening, left) if ours is None else ours) + addend
    if rule in ("max", "min"):  # a side that did not write it has the opening value
        pair = opening if ours is None else ours, opening if theirs is None else theirs
        return torch.maximum(*pair) if rule == "max" else torch.minimum(*pair)
    if rule == "sum" and ours is not None and theirs is not None:
        return ours + theirs
    if rule == JUDGE and (ours is None or theirs is None or not torch.equal(ours, theirs)):
        raise unjudged_error(
            replica.buffer_names[number], "a number that differs from shard to shard"
        )
    return theirs if ours is None else ours


def unjudged_error(name: str, found: str) -> ContractError:
    """Return the error for a buffer whose value after the step can't be known."""
    return ContractError(
        f"the buffer {name} is {found}, so its mean over the shards may make no sense: choose its "
        f"value after a step with Experiment(buffers={{{name!r}: ...}}), as 'mean', 'first' (the "
        f"value after the first shard), 'sum' (of all changes), 'max' or 'min' (of the shards), or "
        f"write it in after_update=...; observe ranges by torch's MovingAverageMinMaxObserver"
    )


def closing_buffers(root: PartialSum) -> Tensors:
    """Return the buffers' values at the end of the step; None where no shard wrote them."""
    if root.weight == 1:  # one shard is the whole batch
        return list(root.buffers)
    replica = root.replica
    closings: Tensors = []
    for total, rule, opening in zip(root.buffers, replica.rules, replica.opening, strict=True):
        if total is not None and is_averaged(total, rule):
            total = (total / root.weight).to(opening.dtype)
        elif total is not None and rule == "sum":
            total = opening + total
        closings.append(total)
    if RANGE in replica.rules:
        _close_ranges(closings, replica)
    return closings


def _close_ranges(closings: Tensors, replica: Replica) -> None:
    """Compute the scale and the zero point of each quantiser from its closing range, in place."""
    place = {name: number for number, name in enumerate(replica.buffer_names)}
    for layer, observer in ranges_of(replica.module):
        scale, zero_point = place[f"{layer}scale"], place[f"{layer}zero_point"]
        if closings[scale] is None and closings[zero_point] is None:
            continue
        closing = copy.deepcopy(observer)
        for key in ("min_val", "max_val"):
            number = place[f"{layer}activation_post_process.{key}"]
            end = closings[number]
            setattr(closing, key, replica.opening[number] if end is None else end)
        found = closing.calculate_qparams()  # type: ignore[operator]
        for number, value in zip((scale, zero_point), found, strict=True):
            opening = replica.opening[number]
            closings[number] = value.to(opening.dtype).reshape(opening.shape)


def divide_gradients(gradients: Sequence[torch.Tensor | None], count: float) -> None:
    """Divide every gradient by `count`, in place."""
    present = [gradient for gradient in gradients if gradient is not None]
    if count != 1 and present:
        divide_all(present, count)


def receive(value: PartialSum, device: Device) -> None:
    """Make the calling lane's streams wait for the kernels that computed `value`.

    On a CPU device that is its stream on the device that has computed it, which copies it next.
    """
    if value.fence is not None:
        streams.wait_for([value.fence], device if device.is_accelerator else value.replica.device)
        streams.keep((value.gradients, value.buffers))


def weighted(buffer: torch.Tensor, weight: int) -> torch.Tensor:
    """Return a buffer times the examples of a shard, in numbers whose range suffices for sums."""
    return (buffer.float() if buffer.dtype in HALF_PRECISION else buffer) * weight


def is_averaged(buffer: torch.Tensor, rule: str) -> bool:
    """Return whether a buffer's value after a step is the mean over the shards."""
    is_whole = not (buffer.is_floating_point() or buffer.is_complex())
    return rule == "mean" or (rule == JUDGE and not is_whole)


def rows_in(gradients: Tensors, tables: Iterable[int]) -> frozenset[int]:
    """Return which gradients of tables are rows."""
    given = [(number, gradients[number]) for number in tables]
    return frozenset(number for number, one in given if one is not None and one.is_sparse)


def densify(value: PartialSum) -> PartialSum:
    """Make the gradients of tables dense, in place."""
    for number in value.tables:
        gradient = value.gradients[number]
        assert gradient is not None
        value.gradients[number] = densified(gradient)
    value.tables = frozenset()
    return value


def with_rows(
    gradient: torch.Tensor | None,
    rows: torch.Tensor | None,
    left: torch.Tensor | None = None,
    early: int = 0,
    *,
    may_accumulate: bool,
) -> torch.Tensor | None:
    """Return the sum of the gradient that a backward pass gave a table, and the rows of it.

    Args:
        gradient: the gradient that the parameter has: dense, or None.
        rows: the rows that the backward pass has left out there.
        left: the sum to its left. A dense one is in `gradient` already, rows are not.
        early: how often torch had counted writes to `left` before the backward pass.
        may_accumulate: whether a shard that uses a table in another way, too, may be refused.

    Raises:
        AccumulatedTwiceError: both parts are of this shard: autograd might have added in a
            different order. The step is attempted again, and the graph of each shard is looked at.
    """
    is_own = gradient is not None and (gradient is not left or version_of(gradient) != early)
    if rows is not None and is_own and may_accumulate:
        raise AccumulatedTwiceError("a table is used in another way, too")
    own = add_rows(gradient, rows)
    return add_rows(left, own) if left is not None and left.is_sparse else own


def refuse_twice(sums: Tensors, before: list[int]) -> None:
    """Make sure that a backward pass has added at most once to each of `sums`.

    Args:
        sums: the gradients that the backward pass accumulated onto.
        before: how often torch had counted writes to each before the backward pass.

    Raises:
        AccumulatedTwiceError: a gradient was written more than once.
    """
    for gradient, early in zip(sums, before, strict=True):
        if gradient is not None and version_of(gradient) > early + 1:
            raise AccumulatedTwiceError("a backward pass added to a gradient twice")


def _add_sparse(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add where one or both are sparse: each element has two terms, so their order is free."""
    if left.is_sparse and right.is_sparse:
        return (left + right).coalesce()
    return right + left if left.is_sparse else left + right


def _unwritten(opening: torch.Tensor, value: PartialSum) -> torch.Tensor:
    """Return the sum, in the tree, of a buffer that none of the shards wrote."""
    total = tree_sum([weighted(opening, weight) for weight in value.weights], torch.add)
    assert total is not None
    return total


def at_home(root: PartialSum, home: Replica) -> PartialSum:
    """Return the root of a step in the memory of the user's module, for the calling lane."""
    if root.fence is not None:
        receive(root, home.device)
    is_there = root.replica.device.memory == home.device.memory
    return root if is_there else _moved(root, home)


def _moved(value: PartialSum, replica: Replica) -> PartialSum:
    """Return a copy in the memory of `replica`, which the calling lane has received."""
    if replica.device.is_accelerator:
        value = densify(value)
    return dataclasses.replace(
        value,
        gradients=streams.copy_each(value.gradients, replica.parameter_devices),
        buffers=streams.copy_each(value.buffers, replica.buffer_devices),
        replica=replica,
        fence=None,
    )


def with_own_memory(gradient: torch.Tensor) -> torch.Tensor:
    """Return a dense gradient that shares its memory with nothing: itself, or a copy.

    A copy has the values and, where they leave no gaps, the strides of `gradient`. Memory that
    torch has not allocated (`torch.from_numpy`) counts as shared, and so does a part of a larger
    storage, or one that an expanded gradient has fewer elements in than it shows.
    """
    storage = gradient.untyped_storage()
    is_alone = (
        users_of(handle_of(storage)) == USERS_OF_ONE
        and storage.nbytes() == gradient.nbytes
        and storage.resizable()
    )
    return gradient if is_alone and not gradient.is_conj() else gradient.clone()


def sparse_with_own_memory(gradient: torch.Tensor, *, coalesce: bool) -> torch.Tensor:
    """Return a sparse gradient that shares its memory with nothing.

    Its values are usually a view of the gradient of what the layer has returned.

    Args:
        gradient: the gradient.
        coalesce: whether to add up the values of rows that occur several times.
    """
    if coalesce and not gradient.is_coalesced():
        return gradient.coalesce()
    return gradient.clone()
