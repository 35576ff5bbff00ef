"""Carries activations into the memory of the next stage's device, and their gradients back."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from evenstep.devices.addresses import ALIGNMENT, copy_with_strides
from evenstep.private_torch.graph import number_of
from evenstep.private_torch.tensors import version_of

_CONTAINERS = (list, deque, dict, OrderedDict, defaultdict)


class Carried:
    """The tensors of one shard that were copied into another stage's memory.

    A tensor is copied once for each stage, from its copy in the stage before. So the gradients of
    its uses are added up in the same order as those of a tensor that is never copied. What a module
    writes into a copy is written into the tensor, too, and lists and dicts stay the same objects:
    the code of the model may read them later.
    """

    def __init__(self) -> None:
        self._copies: dict[int, _Copies] = {}  # by the `id` of the tensor and of each copy
        self._tensors: list[_Copies] = []  # the same, each once
        self._replaced: list[tuple[Any, Any, Any, Any]] = []  # container, key, tensor, copy
        self._stage = 0

    def all(self, given: Any, stage: int) -> Any:
        """Return arguments whose tensors are all in the memory of `stage`, which begins."""
        self._stage = stage
        return self._mapped(given, self._copied)

    def late(self, given: Any, starts: Sequence[int]) -> Any:
        """Return arguments whose tensors from earlier stages are in the present stage's memory.

        Args:
            given: the arguments of a module.
            starts: the sequence number of the first node of each stage after the first.
        """
        if not starts:
            return given

        def carried(tensor: torch.Tensor) -> torch.Tensor:
            node = tensor.grad_fn
            is_earlier = node is not None and number_of(node) < starts[-1]
            return self._copied(tensor) if is_earlier else tensor

        return self._mapped(given, carried)

    def write_back(self) -> None:
        """Write what was written into copies in this stage into the tensors that they are of."""
        for copies in self._tensors:
            copies.write_back()

    def _copied(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = _Copies(tensor)
            self._tensors.append(self._copies[id(tensor)])
        return self._copies[id(tensor)].in_stage(self._stage, self._copies)

    def _mapped(self, given: Any, carried: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Replace the tensors in a nesting, in the same lists and dicts."""
        if isinstance(given, torch.Tensor):
            return carried(given)
        if type(given) in _CONTAINERS:
            pairs = given.items() if isinstance(given, dict) else enumerate(given)
            for key, value in pairs:
                new = self._mapped(value, carried)
                if new is not value:
                    self._replaced.append((given, key, value, new))
                    given[key] = new
        elif isinstance(given, tuple):
            found = [self._mapped(one, carried) for one in given]
            if any(new is not old for new, old in zip(found, given, strict=True)):
                return given._make(found) if hasattr(given, "_make") else type(given)(found)
        return given

    def put_back(self) -> None:
        """Put the tensors back into lists and dicts, which may belong to a module."""
        for container, key, tensor, copy in reversed(self._replaced):
            there = container.get(key) if isinstance(container, dict) else None
            if not isinstance(container, dict) and key < len(container):
                there = container[key]
            if there is copy:
                container[key] = tensor
        self._replaced.clear()


class _Copies:
    """A tensor and its copies, which are kept, so that no other tensor can have the `id` of one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._all = [tensor]
        self._stage = -1  # of the last one
        self._version = 0  # of the last one, when it was made or written back

    def in_stage(self, stage: int, known: dict[int, _Copies]) -> torch.Tensor:
        """Return the copy in the memory of a stage; note a new one in `known`."""
        if stage != self._stage:
            self._all.append(_Carry.apply(self._all[-1]))  # type: ignore[no-untyped-call]
            self._stage = stage
            self._version = version_of(self._all[-1])
            known[id(self._all[-1])] = self
        return self._all[-1]

    def write_back(self) -> None:
        """Write the last copy into the tensors before it, if it was written to."""
        *before, last = self._all
        if before and version_of(last) != self._version:
            self._version = version_of(last)
            with torch.no_grad():
                for tensor in before:
                    tensor.copy_(last)


def is_carry(node: Any) -> bool:
    """Return whether a node of the graph has carried a tensor."""
    return isinstance(node, _NODE)


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
    return copy_with_strides(tensor, int(tensor.storage_offset()) % (ALIGNMENT // tensor.itemsize))


with torch.inference_mode(False), torch.enable_grad():
    _NODE = type(_Carry.apply(torch.ones(1, requires_grad=True)).grad_fn)  # type: ignore[no-untyped-call]
