"""Carries activations into the memory of the next stage's device, and their gradients back."""

from __future__ import annotations

import copy
import re
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optree
import torch
from torch.overrides import TorchFunctionMode

from evenstep.devices.addresses import ALIGNMENT, copy_with_strides
from evenstep.errors import ContractError
from evenstep.private_torch.graph import is_in_backward, nodes_of, number_of
from evenstep.private_torch.tensors import version_of

_CPU = torch.device("cpu")
_CONTAINERS = (list, deque, dict, OrderedDict, defaultdict)


class Carried:
    """The tensors of one shard that were copied into another stage's memory.

    Args:
        devices: the accelerator of each stage, to which tensors of other accelerators are copied;
            empty if the stages are CPU devices with memory of their own.

    A tensor is copied once for each stage, from its copy in the stage before, and later used there
    only. So the gradients of its uses are added up in the same order as those of a tensor that is
    never copied. What a module writes into a copy is written into the tensor, too, and lists and
    dicts stay the same objects: the code of the model may read them later.
    """

    def __init__(self, devices: Sequence[torch.device] = ()) -> None:
        self._devices = devices
        self._copies: dict[int, _Copies] = {}  # by the `id` of the tensor and of each copy
        self._tensors: list[_Copies] = []  # the same, each once
        self._replaced: list[tuple[Any, Any, Any, Any]] = []  # container, key, tensor, copy
        self._stage = 0

    def all(self, given: Any, stage: int) -> Any:
        """Return arguments whose tensors are all in the memory of `stage`, which begins."""
        self._stage = stage
        return self._mapped(given, self.here)

    def late(self, given: Any, stage: int, starts: Sequence[int]) -> Any:
        """Return arguments whose tensors from earlier stages are in the present stage's memory.

        Args:
            given: the arguments of a module.
            stage: the present stage.
            starts: the sequence number of the first node of each stage after the first.
        """
        self._stage = stage
        if self._devices:
            return self._mapped(given, self.here)
        if not starts:
            return given

        def carried(tensor: torch.Tensor) -> torch.Tensor:
            node = tensor.grad_fn
            is_earlier = node is not None and number_of(node) < starts[-1]
            return self.here(tensor) if is_earlier else tensor

        return self._mapped(given, carried)

    def home(self, output: Any) -> Any:
        """Return what the model has returned, in new containers, in the first stage's memory."""
        self._stage = 0

        def carried(leaf: Any) -> Any:
            return self.here(leaf) if isinstance(leaf, torch.Tensor) else leaf

        if not isinstance(output, dict) or type(output) in _CONTAINERS:
            return optree.tree_map(carried, output)
        again = copy.copy(output)  # of a class of its own
        for key, value in output.items():
            again[key] = optree.tree_map(carried, value)
        return again

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor was copied, or is a copy."""
        return id(tensor) in self._copies

    def refuse_uses_beside_copies(self, total: torch.Tensor) -> None:
        """Refuse a tensor that is used itself between uses of its copy: sums have an order.

        A function of torch gets the copy. One of `torch.autograd.Function`, outside of a module,
        gets the tensor.

        Raises:
            ContractError: names what uses it.
        """
        uses: dict[Any, list[Any]] = {}
        for node in nodes_of(total):
            for source in node.next_functions:
                uses.setdefault(source, []).append(node)
        for chain in self._tensors:
            for source, carry in chain.links:
                later = max(map(number_of, uses.get((carry, 0), ())), default=-1)
                for node in uses.get(source, ()):
                    if number_of(carry) < number_of(node) < later:
                        raise ContractError(
                            f"{node.name()} uses a tensor of an earlier stage between functions "
                            f"that use its copy, so its gradients would be added up in a different "
                            f"order: call it in a module that gets the tensor"
                        )

    def write_back(self) -> None:
        """Write what was written into copies in this stage into the tensors that they are of."""
        for copies in self._tensors:
            copies.write_back()

    def here(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the memory of the present stage."""
        return self._there(tensor, self._devices[self._stage] if self._devices else tensor.device)

    def _there(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        known = self._copies.get(id(tensor))
        if self._devices and tensor.device == _CPU:
            return tensor
        if known is None or known.is_outdated or known.lacks_graph:
            if self._devices and tensor.device == device:
                return tensor
            known = self._copies[id(tensor)] = _Copies(tensor)
            self._tensors.append(known)
        return known.at(device if self._devices else self._stage, device, self._copies)

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
        for container, key, tensor, other in reversed(self._replaced):
            there = container.get(key) if isinstance(container, dict) else None
            if not isinstance(container, dict) and key < len(container):
                there = container[key]
            if there is other:
                container[key] = tensor
        self._replaced.clear()


class _Copies:
    """A tensor and its copies, which are kept, so that no other tensor can have the `id` of one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._all = [tensor]
        self._place: object = None  # of the last one
        self.links: list[tuple[Any, Any]] = []  # from the node of each tensor to that of its copy
        self._versions = [_version(tensor)]  # when the last one was made, or written back

    @property
    def is_outdated(self) -> bool:
        """Whether the tensor itself was written to, so that its copies no longer equal it."""
        pairs = zip(self._all[:-1], self._versions, strict=False)
        return any(_version(one) != version for one, version in pairs)

    @property
    def lacks_graph(self) -> bool:
        """Whether the last copy was made without gradients, which are wanted now."""
        first, last = self._all[0], self._all[-1]
        return torch.is_grad_enabled() and first.requires_grad and not last.requires_grad

    def at(self, place: object, device: torch.device, known: dict[int, _Copies]) -> torch.Tensor:
        """Return the copy in the memory of a stage, on `device`; note a new one in `known`."""
        if place != self._place:
            source = self._all[-1]
            copied = _carry(source, device)
            if copied.grad_fn is not None and source.grad_fn is not None:
                self.links.append(((source.grad_fn, source.output_nr), copied.grad_fn))
            self._all.append(copied)
            self._place = place
            self._versions = [*map(_version, self._all)]
            known[id(copied)] = self
        return self._all[-1]

    def write_back(self) -> None:
        """Write the last copy into the tensors before it, if it was written to."""
        *before, last = self._all
        if before and _version(last) != self._versions[-1] and not self.is_outdated:
            with torch.no_grad():
                for tensor in before:
                    tensor.copy_(last)
            self._versions = [*map(_version, self._all)]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


class Crossing(TorchFunctionMode):
    """Lets torch's functions take tensors of several accelerators, where a model has stages.

    Without it they would fail. What lies elsewhere is carried to where the present stage is; if the
    function writes into its first argument, to where that lies. Lanes compute in it.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        given = [*_accelerated((*args, *kwargs.values()))]
        carried: Carried | None = getattr(SHARD_HERE, "carried", None)
        if len({tensor.device for tensor in given}) > 1 or (
            carried is not None and any(map(carried.knows, given)) and not is_in_backward()
        ):
            args, kwargs = _crossed(function, args, kwargs, carried)
        return function(*args, **kwargs)


_VIEWS = {"T", "mT", "H", "mH", "real", "imag"}  # properties that are operations
_WRITES = re.compile(r"__i(\w*(add|sub|mul|div|mod|pow|and|or|shift))__|__set(item)?__|.*[^_]_")
SHARD_HERE = threading.local()  # .carried: the tensors of the shard that the thread computes


def _accelerated(given: Sequence[Any]) -> Iterator[torch.Tensor]:
    for one in given:
        if isinstance(one, torch.Tensor):
            if one.device.type != "cpu":
                yield one
        elif isinstance(one, list | tuple):
            yield from _accelerated(one)


def _crossed(
    function: Any, args: Sequence[Any], kwargs: dict[str, Any], carried: Carried | None
) -> Any:
    """Return arguments whose tensors on accelerators all lie on one of them."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        name = getattr(function.__self__, "__name__", "")
        if name not in _VIEWS:
            return args, kwargs
    if name.startswith("_foreach"):
        return args, kwargs
    writes = "out" in kwargs or _WRITES.fullmatch(name) is not None
    written = next(_accelerated((kwargs.get("out"), *args)))
    first = written.device

    def there(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device.type == "cpu":
            return leaf
        if carried is not None and (not writes or leaf is not written):
            leaf = carried.here(leaf)
        return (
            leaf if leaf.device == first or not (writes or carried is None) else _carry(leaf, first)
        )

    nested: Any = (tuple(args), kwargs)
    return optree.tree_map(there, nested)


def _carry(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a tensor on a device, with a graph.

    Between a leaf and the node that copies lies a view, whose node is on the leaf's device: its
    gradient is added up there, on the stream of this thread.
    """
    if tensor.is_leaf and tensor.requires_grad:
        tensor = tensor.view_as(tensor)
    carried: torch.Tensor = _Carry.apply(tensor, device)  # type: ignore[no-untyped-call]
    return carried


def is_carry(node: Any) -> bool:
    """Return whether a node of the graph has carried a tensor."""
    return isinstance(node, _NODE)


class _Carry(torch.autograd.Function):
    """The tensor itself, in other memory."""

    @staticmethod
    def forward(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return copied(tensor, device)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.set_materialize_grads(False)
        ctx.source = inputs[0].device

    @staticmethod
    def vmap(info: Any, in_dims: Any, tensor: torch.Tensor, device: torch.device) -> Any:
        return _Carry.apply(tensor, device), in_dims[0]  # type: ignore[no-untyped-call]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        (gradient,) = gradients
        if gradient is None:
            return None, None
        return _Carry.apply(gradient, ctx.source), None  # type: ignore[no-untyped-call]


def copied(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return a copy with the same strides and the same alignment: kernels may round by them."""
    if tensor.layout is not torch.strided:
        return tensor.detach().to(device or tensor.device, copy=True)
    offset = int(tensor.storage_offset()) % (ALIGNMENT // tensor.itemsize)
    return copy_with_strides(tensor, offset, device)


with torch.inference_mode(False), torch.enable_grad():
    _NODE = type(_Carry.apply(torch.ones(1, requires_grad=True), _CPU).grad_fn)  # type: ignore[no-untyped-call]
