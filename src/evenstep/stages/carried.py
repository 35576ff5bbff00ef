"""Carries activations into the memory of the next stage's device, and their gradients back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch

_ALIGNMENT = 64  # bytes, of torch's allocations


class Carried:
    """The tensors of one shard that were copied into another stage's memory.

    A tensor is copied once for each stage, from its copy in the stage before. So the gradients of
    its uses are added up in the same order as those of a tensor that is never copied.
    """

    def __init__(self) -> None:
        self._copies: dict[int, _Copies] = {}  # by the `id` of the tensor and of each copy
        self._stage = 0

    def all(self, given: Any, stage: int) -> Any:
        """Return arguments whose tensors are all in the memory of `stage`, which begins."""
        self._stage = stage
        return self._mapped(given, lambda tensor: True)

    def late(self, given: Any, starts: Sequence[int]) -> Any:
        """Return arguments whose tensors from earlier stages are in the present stage's memory.

        Args:
            given: the arguments of a module.
            starts: the sequence number of the first node of each stage after the first.
        """
        if not starts:
            return given

        def is_earlier(tensor: torch.Tensor) -> bool:
            node = tensor.grad_fn
            return node is not None and node._sequence_nr() < starts[-1]

        return self._mapped(given, is_earlier)

    def _mapped(self, given: Any, is_elsewhere: Any) -> Any:
        def carried(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not is_elsewhere(leaf):
                return leaf
            copies = self._copies.setdefault(id(leaf), _Copies(leaf))
            return copies.in_stage(self._stage, self._copies)

        return optree.tree_map(carried, given)


class _Copies:
    """A tensor and its copies, which are kept, so that no other tensor can have the `id` of one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._all = [tensor]
        self._stage = -1  # of the last one

    def in_stage(self, stage: int, known: dict[int, _Copies]) -> torch.Tensor:
        """Return the copy in the memory of a stage; note a new one in `known`."""
        if stage != self._stage:
            self._all.append(_Carry.apply(self._all[-1]))  # type: ignore[no-untyped-call]
            self._stage = stage
            known[id(self._all[-1])] = self
        return self._all[-1]


def is_carry(node: Any) -> bool:
    """Return whether a node of the graph has carried a tensor."""
    return isinstance(node, _Carry._backward_cls)


class _Carry(torch.autograd.Function):
    """The tensor itself, in other memory."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return copied(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        (gradient,) = gradients
        return None if gradient is None else _Carry.apply(gradient)  # type: ignore[no-untyped-call]


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides and the same alignment: kernels may round by them."""
    if tensor.layout is not torch.strided:
        return tensor.detach().clone()
    source = tensor.detach().resolve_conj().resolve_neg()
    for dim, stride in enumerate(source.stride()):
        if stride == 0 and source.shape[dim] > 1:  # expanded: one element in memory
            source = source.narrow(dim, 0, 1)
    pairs = zip(source.shape, source.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in pairs) if source.numel() else 0
    offset = tensor.storage_offset() % (_ALIGNMENT // tensor.itemsize)
    memory = source.new_empty(offset + extent)
    memory.as_strided(source.shape, source.stride(), offset).copy_(source)
    # Not a view: torch refuses to write to views that a function of autograd returns.
    return source.new_empty(0).set_(memory.untyped_storage(), offset, tensor.shape, tensor.stride())
