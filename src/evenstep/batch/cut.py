"""Cuts a minibatch into shards: the boundaries depend on its size and on V, never on devices.

The boundaries are those of `numpy.array_split`: sizes differ by at most one, the longer shards come
first. (Virtual nodes in VirtualFlow, MLSys 2022, are shards in this sense; `split_and_load` in Dive
into Deep Learning, "Training on Multiple GPUs", cuts by device instead.)
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeAlias

import numpy as np
import optree
import torch
from torch.utils.data import DataLoader

from evenstep.batch.whole import Shared, is_plain, kind_of, transposed_or_shared
from evenstep.collectives import even_bounds
from evenstep.devices import Device, accelerator
from evenstep.errors import BatchError, ContractError
from evenstep.private_torch.tensors import version_of

Batch: TypeAlias = Any
"""Any nesting of tuples, lists and dicts of tensors with the same number of examples, and of
tensors that `shared` has marked."""

Place: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Copies a tensor to a device; it returns a tensor in memory of its own."""


class _Copy(NamedTuple):
    """A copy of a shared tensor on a device.

    Attributes:
        tensor: the copy.
        version: how often it had been written to when it was made.
        fence: on an accelerator, the event behind its copying; None on a CPU.
    """

    tensor: torch.Tensor
    version: int | None
    fence: torch.Event | None


@functools.lru_cache(maxsize=8)
def shard_bounds(examples: int, shards: int) -> list[tuple[int, int]]:
    """Return the half-open range [lo, hi) of examples in each of the `shards` shards.

    A batch smaller than the number of shards leaves the last shards empty (lo == hi). The answer is
    kept, since most batches have one size, and must not be changed.
    """
    if shards < 1:
        raise BatchError(f"got {shards} shards: at least 1 is needed")
    return even_bounds(examples, shards)


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a minibatch that one process computes: the examples of its run of shards.

    Attributes:
        examples: the number of examples in the whole minibatch.
        bounds: the examples [lo, hi) of each shard.
        runs: the shards of each process; together all shards with examples, in order.
        rank: this process's number.
        dim: the dimension that the examples lie along, of tensors that have it.
        own_shards: the number of micro-batches of the user's own; None for a batch that is cut.
    """

    examples: int
    bounds: Sequence[tuple[int, int]]
    runs: tuple[range, ...]
    rank: int = 0
    dim: int = 0
    own_shards: int | None = None

    @property
    def run(self) -> range:
        """The shards of this process."""
        return self.runs[self.rank]

    @property
    def own(self) -> slice:
        """The examples of this process."""
        run = self.run
        return slice(self.bounds[run.start][0], self.bounds[run.stop - 1][1]) if run else slice(0)

    @property
    def own_examples(self) -> int:
        """The number of examples of this process."""
        return len(range(self.examples)[self.own])


@dataclasses.dataclass(frozen=True)
class Cut:
    """A minibatch cut into shards, of which a process may hold only its own.

    Attributes:
        part: the boundaries, and which process computes which shards.
        views: for each shard that is held here, its slice of each tensor of the batch; the whole
            tensor where it is shared.
        structure: the nesting of the batch, which each shard has too.
        versions: how often each tensor of the batch had been written to when it was cut; None for
            tensors whose writes torch does not count.
        shared: the places, among the tensors of the batch, of those that every shard gets whole.
        copies: for each `place` of a device, its copies of the shared tensors.
        bounds: the examples [lo, hi) of each shard; only the first `filled` have any.
        filled: the number of shards with examples.
        weights: the number of examples in each shard; 1 if only one shard has any.
        divisor: the sum of the weights: what the backward pass of each shard divides by.
    """

    part: Part
    views: Mapping[int, tuple[torch.Tensor, ...]]
    structure: optree.PyTreeSpec
    versions: Sequence[int | None] = ()
    shared: Sequence[int] = ()
    copies: dict[Place, dict[int, _Copy]] = dataclasses.field(default_factory=dict)
    bounds: Sequence[tuple[int, int]] = dataclasses.field(init=False)
    filled: int = dataclasses.field(init=False)
    weights: Sequence[int] = dataclasses.field(init=False)
    divisor: int = dataclasses.field(init=False)

    can_join: ClassVar[bool] = True
    """Whether shards fit together as one batch."""

    def __post_init__(self) -> None:
        bounds = self.part.bounds
        filled = self.part.own_shards or min(self.part.examples, len(bounds))
        weights = [1] if filled == 1 else [hi - lo for lo, hi in bounds]
        divisor = 1 if filled == 1 else self.part.examples
        facts = {"bounds": bounds, "filled": filled, "weights": weights, "divisor": divisor}
        for name, value in facts.items():
            object.__setattr__(self, name, value)

    def take(self, shard: int, place: Place) -> Batch:
        """Return one shard as a batch, each tensor copied to a device by `place`.

        `place` gets a view and must return a copy in memory of its own: a shard is computed on
        tensors of exactly its own shape, never on views at an odd offset of a larger one. A shared
        tensor is copied once for each `place`.
        """
        if not self.shared:
            return self.structure.unflatten(map(place, self.views[shard]))
        return self.structure.unflatten(
            self._copy_of(number, view, place) if number in self.shared else place(view)
            for number, view in enumerate(self.views[shard])
        )

    def structure_of(self, shard: int) -> optree.PyTreeSpec:
        """Return the nesting of a shard: one that is held here, or the first."""
        return self.structure

    def _copy_of(self, number: int, tensor: torch.Tensor, place: Place) -> torch.Tensor:
        copies = self.copies.setdefault(place, {})
        if number not in copies:
            copy = place(tensor)
            fence = None if copy.is_cpu else accelerator.fence_here(copy.device)
            copies[number] = _Copy(copy, _version(copy), fence)
        found = copies[number]
        if found.fence is not None:  # made on the stream of another thread, perhaps
            accelerator.wait_here(found.fence, found.tensor.device)
            accelerator.keep(found.tensor)
        return found.tensor

    def refuse_written_copies(self) -> None:
        """Refuse a shard that wrote to a shared tensor, which other shards read too."""
        for copies in [*self.copies.values()]:
            for copy, version, _ in [*copies.values()]:
                if _version(copy) != version:
                    raise ContractError(
                        f"a shard wrote to the tensor of shape {tuple(copy.shape)} that the batch "
                        f"has as evenstep.shared(...), which the other shards read too: write to a "
                        f"clone() of it"
                    )

    def join(self, shards: Sequence[int], place: Place) -> Batch:
        """Return some shards together as one batch, each tensor copied to a device by `place`."""
        tensors = [*zip(*(self.views[shard] for shard in shards), strict=True)]
        return self.structure.unflatten(
            place(
                parts[0]
                if number in self.shared
                else torch.cat(parts, dim_of(parts[0], self.part.dim))
            )
            for number, parts in enumerate(tensors)
        )

    def first_example(self, place: Place) -> Batch:
        """Return the first example that is held here as a batch, copied to a device by `place`."""
        return self.structure.unflatten(
            place(view if number in self.shared else view.narrow(dim_of(view, self.part.dim), 0, 1))
            for number, view in enumerate(self.views[self.part.run[0]])
        )

    def lies_on(self, taken: Batch, device: Device) -> bool:
        """Whether all tensors of a shard returned by `take` are on `device`."""
        return all(tensor.device == device.torch_device for tensor in tensors_of(taken))

    def held(self) -> Iterable[torch.Tensor]:
        """Return tensors that share the counts of writes with those of the batch."""
        return next(iter(self.views.values()), ())

    def check_unchanged(self) -> None:
        """Refuse a batch that was written to after it was cut."""
        held = [*self.held()]
        if held and self.versions != versions_of(held):
            raise BatchError(
                "the batch was written to while its step was in flight: give each step tensors of "
                "its own, or call waitall() first, or use max_in_flight=1"
            )


class Precut(abc.ABC):
    """A batch that comes as shards: the first argument of a step, and its only one."""

    @abc.abstractmethod
    def cut_alone(self, arguments: tuple[Batch, ...], shards: int) -> Cut:
        """Cut the arguments of a step for the only process."""


def cut_whole_batch(batch: Batch, shards: int, step: int = 0, dim: int = 0) -> Cut:
    """Cut a batch for the only process; `step` does not matter."""
    if batch and isinstance(batch[0], Precut):
        return batch[0].cut_alone(batch, shards)
    return cut_batch(batch, shards, dim=dim)


NO_CUT = Cut(Part(0, (), (range(0),)), {}, optree.treespec_tuple())
"""Replaces the cut of a finished step, to release the batch."""


def cut_batch(
    batch: Batch, shards: int, part: Part | Callable[[int], Part] | None = None, dim: int = 0
) -> Cut:
    """Cut `batch` into `shards` shards.

    Args:
        batch: a minibatch; or, if it has as many examples as `part` assigns to this process, this
            process's examples of one.
        shards: V.
        part: this process's part of the minibatch, or what returns it, given the number of its
            examples; None for the only process.
        dim: the dimension that the examples lie along, of tensors that have it; the first of
            others. A `Part` has its own.

    Raises:
        BatchError: the batch has no tensors, a different kind of leaf, no examples, or tensors
            whose numbers of examples differ.
    """
    leaves, structure = _flatten(batch)
    dim = part.dim if isinstance(part, Part) else dim
    here = _check_examples(batch, leaves, dim, may_be_empty=isinstance(part, Part))
    tensors, dims = [], list[int | None]()
    for leaf in leaves:
        is_shared = isinstance(leaf, Shared)
        tensors.append((leaf.tensor if is_shared else leaf).detach())
        dims.append(None if is_shared else dim_of(leaf, dim))
    if part is None:
        part = Part(here, shard_bounds(here, shards), (range(min(here, shards)),), dim=dim)
    elif not isinstance(part, Part):
        part = part(here)
    own = part.own_examples if len(part.runs) > 1 else part.examples
    if here == part.examples > own:
        tensors = [
            tensor if along is None else tensor.narrow(along, part.own.start or 0, own)
            for tensor, along in zip(tensors, dims, strict=True)
        ]
    elif here != own:
        raise BatchError(
            f"got a batch of {here} examples, but the loader's last batch has {part.examples}, "
            f"{own} of them for this process: give step what epoch() yields"
        )
    sizes = [part.bounds[shard][1] - part.bounds[shard][0] for shard in part.run]
    pieces = [
        [tensor] * len(sizes)
        if along is None or len(sizes) == 1
        else tensor.split_with_sizes(sizes, along)
        for tensor, along in zip(tensors, dims, strict=True)
    ]
    views = dict(zip(part.run, zip(*pieces, strict=True), strict=True))
    has_shared = None in dims
    shared = [number for number, along in enumerate(dims) if along is None] if has_shared else ()
    return Cut(part, views, structure, versions_of(tensors), shared)


def count_examples(batch: Batch, dim: int = 0) -> int:
    """Return the number of examples in `batch`. Raises BatchError like `cut_batch`."""
    return _check_examples(batch, _flatten(batch)[0], dim)


def without_examples(batch: Batch, dim: int = 0) -> Batch:
    """Return a batch like `batch` with 0 examples."""
    return optree.tree_map(
        lambda leaf: (
            leaf.narrow(dim_of(leaf, dim), 0, 0) if isinstance(leaf, torch.Tensor) else leaf
        ),
        batch,
    )


def _flatten(batch: Batch) -> tuple[list[Any], optree.PyTreeSpec]:
    try:
        return optree.tree_flatten(batch)
    except RecursionError:
        raise too_deep() from None


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """Return the tensors in a shard's batch, in the order of its nesting."""
    return [leaf for leaf in optree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def too_deep() -> BatchError:
    """Return the error for a nesting that Python can't follow."""
    return BatchError(
        "got a batch that is nested too deeply, or that holds itself: give a tuple of tensors"
    )


def name_of(path: Iterable[object]) -> str:
    """Return how a message calls what lies in a batch, such as "batch[0]['mask']"."""
    return "batch" + "".join(f"[{step!r}]" for step in path)


def dim_of(tensor: torch.Tensor, dim: int) -> int:
    """Return the dimension that the examples of a tensor lie along."""
    return dim if dim < tensor.ndim else 0


def without_foreign_memory(batch: Batch) -> Batch:
    """Return `batch` with a copy of each tensor in memory that torch has not allocated.

    What lies behind `torch.from_numpy` may be written to without a version counter that tells.
    """
    leaves, structure = _flatten(batch)
    if not any(map(_is_foreign, leaves)):
        return batch
    return structure.unflatten(leaf.clone() if _is_foreign(leaf) else leaf for leaf in leaves)


def _is_foreign(leaf: object) -> bool:
    if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu":
        return False
    if leaf.layout is not torch.strided:
        return False
    storage = leaf.untyped_storage()
    return not storage.resizable() and not storage.is_shared()


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Return how often each tensor was written to; a view shares the count of its base."""
    return [*map(_version, tensors)]


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else version_of(tensor)


def _check_examples(
    batch: Batch, leaves: Sequence[object], dim: int, *, may_be_empty: bool = False
) -> int:
    lengths = {
        leaf.shape[dim_of(leaf, dim)]
        if isinstance(leaf, torch.Tensor)
        and leaf.layout is torch.strided
        and not (leaf.is_meta or leaf.is_nested)
        and leaf.ndim
        else None
        for leaf in leaves
        if not isinstance(leaf, Shared)
    }
    if len(lengths) != 1 or None in lengths:
        _refuse(batch, dim)
    (examples,) = lengths
    assert examples is not None
    if not examples and not may_be_empty:
        raise BatchError("got a batch of 0 examples: skip it, or drop the last batch")
    return examples


def _instead_of(leaf: object) -> str:
    """Return what a value is that is no tensor, and what is needed."""
    kind = type(leaf).__name__
    if isinstance(leaf, np.ndarray):
        return "a numpy array: give a tensor, torch.from_numpy(array)"
    if isinstance(leaf, Iterator | DataLoader):
        return (
            f"a {kind}, which gives batches: write `for X, y in trainer.epoch(loader): "
            f"trainer.step(X, y)`"
        )
    return f"of type {kind}: give tensors, examples first"


def _refuse(batch: Batch, dim: int) -> NoReturn:
    """Raise the error for a batch whose tensors don't all have the same number of examples."""
    paths, leaves, _ = optree.tree_flatten_with_path(batch)
    if not leaves:
        raise BatchError("got a batch without tensors: give at least one, examples first")
    names = [*map(name_of, paths)]
    cut = {}
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, Shared):
            continue
        if not isinstance(leaf, torch.Tensor):
            raise BatchError(f"{name} is {_instead_of(leaf)}")
        if not is_plain(leaf):
            raise BatchError(f"{name} is {kind_of(leaf)}")
        if leaf.ndim == 0 and leaf.requires_grad:
            raise BatchError(
                f"{name} is a loss: give the batch, trainer.step(X, y), which computes the loss "
                f"and its gradients on all devices"
            )
        if leaf.ndim == 0:
            raise BatchError(
                f"{name} is a single number: give tensors, examples first, or "
                f"evenstep.shared(tensor) for one that every shard needs"
            )
        cut[name] = leaf.shape[dim_of(leaf, dim)]
    if not cut:
        raise BatchError(
            "got a batch of nothing but shared tensors: give at least one that has examples"
        )
    where = f"dimension {dim}, or the first of a tensor without it" if dim else "first dimension"
    got = ", ".join(f"{name} has {examples}" for name, examples in cut.items())
    raise BatchError(
        f"the tensors of a batch need the same number of examples ({where}), but {got}; "
        f"{transposed_or_shared(dict(zip(names, leaves, strict=True)), cut)}"
    )
