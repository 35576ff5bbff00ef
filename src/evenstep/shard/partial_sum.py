"""Partial sums: what some shards contribute to a step, and how two contributions are added.

A partial sum is the value of a node of the canonical tree. `add` is the only place where gradients
and buffers of different shards meet, so its order of operands is part of the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from evenstep.collectives import tree_sum
from evenstep.devices import Device, carry
from evenstep.engine import streams
from evenstep.errors import EvenstepError
from evenstep.replicas import Replica

Tensors: TypeAlias = "list[torch.Tensor | None]"
Add: TypeAlias = "Callable[[PartialSum, PartialSum], PartialSum]"


class AccumulatedTwiceError(EvenstepError):
    """A backward pass has added to one gradient twice.

    A backward pass inside the backward pass does that (recomputed activations with
    `use_reentrant`) if both reach one parameter. Accumulated onto a left sum, the result is
    (left + a) + b instead of left + (a + b); and a gradient that was sent after a is not final.
    """


@dataclasses.dataclass
class PartialSum:
    """The value of a node of the canonical tree.

    Attributes:
        gradients: for each parameter the sum of the shards' gradients, or None where no shard
            reached the parameter. Sparse gradients are coalesced.
        buffers: for each floating-point buffer the sum of weight × value over the shards, for an
            integer buffer its value after shard 0; None where no shard wrote the buffer.
        weights: the number of examples of each shard.
        replica: the replica in whose memory the tensors are.
        lo, hi: the node's shards are [lo, hi).
        is_dense: whether no gradient is sparse.
        fence: on a GPU, the event to wait for before the tensors are used.
    """

    gradients: Tensors
    buffers: Tensors
    weights: tuple[int, ...]
    replica: Replica
    lo: int
    hi: int
    is_dense: bool = True
    fence: Any = None

    @property
    def weight(self) -> int:
        """The number of examples of all its shards."""
        return sum(self.weights)


def add(left: PartialSum, right: PartialSum) -> PartialSum:
    """Return left + right in the memory of `left`, whose tensors are reused."""
    device = left.replica.device
    if device.kind == "cuda":
        receive(left, device)
        receive(right, device)
    if right.replica.device.memory != device.memory:
        right = _moved(right, left.replica)
    return PartialSum(
        add_gradients(left.gradients, right.gradients),
        add_buffers(left, right) if left.buffers else [],
        (*left.weights, *right.weights),
        left.replica,
        left.lo,
        right.hi,
        left.is_dense and right.is_dense,
        streams.fence_here(device) if device.kind == "cuda" else None,
    )


def add_gradients(left: Tensors, right: Tensors) -> Tensors:
    """Return left + right, reusing the memory of `left` where possible; None adds nothing."""
    result = list(left)
    dense: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for number, (ours, theirs) in enumerate(zip(left, right, strict=True)):
        if ours is None or theirs is None:
            result[number] = theirs if ours is None else ours
        elif ours.is_sparse or theirs.is_sparse:
            result[number] = _add_sparse(ours, theirs)
        else:
            dense[0].append(ours)
            dense[1].append(theirs)
    if dense[0]:
        torch._foreach_add_(*dense)
    return result


def add_buffers(left: PartialSum, right: PartialSum) -> Tensors:
    """Add sums of buffers; a side that did not write a buffer contributes its opening value."""
    openings = left.replica.opening
    result: Tensors = []
    for ours, theirs, opening in zip(left.buffers, right.buffers, openings, strict=True):
        if ours is None and theirs is None:
            result.append(None)
        elif not is_averaged(opening):
            result.append(theirs if ours is None else ours)
        else:
            addend = _unwritten(opening, right) if theirs is None else theirs
            result.append((_unwritten(opening, left) if ours is None else ours) + addend)
    return result


def closing_buffers(root: PartialSum) -> Tensors:
    """Return the buffers' values at the end of the step: weighted means, None where unwritten."""
    return [
        total / root.weight
        if total is not None and is_averaged(total) and root.weight != 1
        else total
        for total in root.buffers
    ]


def divide_gradients(gradients: Sequence[torch.Tensor | None], count: float) -> None:
    """Divide every gradient by `count`, in place."""
    if count != 1:
        for gradient in gradients:
            if gradient is not None:
                gradient.div_(count)


def receive(value: PartialSum, device: Device) -> None:
    """On a GPU, make the calling lane's stream wait for the kernels that computed `value`."""
    if value.fence is not None:
        streams.wait_for([value.fence], device)
        streams.keep((value.gradients, value.buffers))


def is_averaged(buffer: torch.Tensor) -> bool:
    """Return whether a buffer closes a step at its mean (floating point) or at shard 0's value."""
    return buffer.is_floating_point() or buffer.is_complex()


def versions(gradients: Tensors) -> list[int]:
    """Return how often each gradient was written, as torch counts."""
    return [gradient._version for gradient in gradients if gradient is not None]


def refuse_twice(sums: Tensors, before: list[int]) -> None:
    """Make sure that a backward pass has added at most once to each of `sums`.

    Args:
        sums: the gradients that the backward pass accumulated onto.
        before: their `versions` before the backward pass.

    Raises:
        AccumulatedTwiceError: a gradient was written more than once.
    """
    for late, early in zip(versions(sums), before, strict=True):
        if late > early + 1:
            raise AccumulatedTwiceError("a backward pass added to a gradient twice")


def _add_sparse(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add where one or both are sparse: each element has two terms, so their order is free."""
    if left.is_sparse and right.is_sparse:
        return (left + right).coalesce()
    return right + left if left.is_sparse else left + right


def _unwritten(opening: torch.Tensor, value: PartialSum) -> torch.Tensor:
    """Return the sum, in the tree, of a buffer that none of the shards wrote."""
    total = tree_sum([opening * weight for weight in value.weights], torch.add)
    assert total is not None
    return total


def _moved(value: PartialSum, replica: Replica) -> PartialSum:
    """Return a copy in the memory of `replica`."""

    def moved(tensors: Tensors) -> Tensors:
        return [None if tensor is None else carry(tensor, replica.device) for tensor in tensors]

    return dataclasses.replace(
        value,
        gradients=moved(value.gradients),
        buffers=moved(value.buffers),
        replica=replica,
        fence=None,
    )
