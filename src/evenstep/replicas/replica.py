"""A replica: the user's model, or a copy of it, on one device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from evenstep.devices import Device, accelerator
from evenstep.engine import streams
from evenstep.errors import InputError, ModelError
from evenstep.private_torch.modules import has_backward_hooks, own_buffers
from evenstep.private_torch.tensors import copy_all, rows_of, version_of
from evenstep.replicas.checks import Members


class Replica:
    """A model on one device.

    Args:
        device: the device that computes on this replica.
        module: the user's module (the home replica) or a copy of it.
        outer: the `id`s of the user's parameters if `module` is a copy of the user's.
        rules: the rule of every buffer.
        places: the device of every module, in the order of `modules()`, if it lies on several.
        members: those of `module`, if they are known.

    Attributes:
        module_devices: the same; all are `device` if it lies on one.
        parameter_devices, buffer_devices: the device of each parameter, and of each buffer.
        parameters: the module's parameters in the order of `named_parameters()`, each once.
        names: the names of the parameters.
        buffer_names: the names of the buffers.
        buffers: the replica's own buffer tensors, in the order of `named_buffers()`.
        opening: the values that the buffers have when a shard starts, in this replica's memory.
        given: the opening values in a different memory, from where they are yet to be copied.
        has_run_backward: whether a backward pass has reached the parameters.
        may_accumulate: whether a backward pass may add to the gradients of other shards: not where
            layers have sparse gradients, or hooks on their backward pass, which could see them.
        has_accumulated: whether a backward pass has done so.
        has_hooks: whether layers have hooks on their backward pass.
        tables: the parameters whose gradients are kept as rows: from the `id` of each to its
            number; None before the first shard shows it.
        outer: as given.
        graph_nodes: how many nodes the graph of a loss has had that was searched for `outer` in
            this step; -1 before the first.
    """

    def __init__(
        self,
        device: Device,
        module: nn.Module,
        outer: frozenset[int] = frozenset(),
        rules: Sequence[str] = (),
        places: Sequence[Device] = (),
        members: Members | None = None,
    ) -> None:
        members = Members.of(module) if members is None else members
        modules = [one for _, one in members.modules]
        self.device = device
        self.module = module
        self.names = [name for name, _ in members.parameters]
        self.parameters = [one for _, one in members.parameters]
        self.buffer_names = [name for name, _ in members.buffers]
        self.buffers = [one for _, one in members.buffers]
        self.rules = rules
        self.module_devices = places or [device] * len(modules)
        self.parameter_devices = devices_of(self.parameters, modules, self.module_devices)
        self.buffer_devices = devices_of(self.buffers, modules, self.module_devices)
        self.opening: list[torch.Tensor] = []
        self.given: list[torch.Tensor] | None = None
        self.has_run_backward = False
        self.has_hooks = any(map(has_backward_hooks, modules))
        has_sparse = any(getattr(child, "sparse", False) for child in modules)
        self.may_accumulate = not (self.has_hooks or has_sparse)
        self.has_accumulated = False
        self.tables: Mapping[int, int] | None = None
        self.outer = outer
        self.graph_nodes = -1
        self._slots = _buffer_slots(modules, self.buffers)

    def open_shard(self) -> None:
        """Reset every buffer to its opening value."""
        if self.buffers:
            try:
                with torch.no_grad():
                    copy_all(self.buffers, self.opening)
            except RuntimeError:
                self._refuse_reshaped()
                raise

    def take_given(self) -> None:
        """Copy the opening values to this replica's memory; called in its device's lane."""
        assert self.given is not None
        self.opening = streams.copy_each(self.given, self.buffer_devices)
        self.given = None

    def put_back_shapes(self) -> None:
        """Give every buffer that a shard has resized its opening shape again."""
        for buffer, opening in zip(self.buffers, self.opening, strict=False):
            if buffer.shape != opening.shape:
                buffer.resize_(opening.shape)

    def _refuse_reshaped(self) -> None:
        pairs = zip(self.buffer_names, self.opening, self.buffers, strict=True)
        for name, opening, buffer in pairs:
            if opening.shape != buffer.shape:
                raise reshaped_error(name, opening, buffer)

    def changed_buffers(
        self, differ: Sequence[torch.Tensor | None] | None = None
    ) -> list[torch.Tensor | None]:
        """Return each buffer whose value the shard has changed (None for the others).

        Compares bits, not version counters: batch normalisation writes its running statistics
        without counting.

        Args:
            differ: what `differences` has returned, on the host; None to compare here.
        """
        known = differ or [None] * len(self._slots)
        try:
            found = zip(self.values(), self.opening, self.buffer_names, known, strict=True)
            return [changed(*one) for one in found]
        finally:
            self.put_back_buffers()

    def differences(self) -> list[torch.Tensor | None]:
        """Return for each buffer whether the shard has changed it, as a bool on the device.

        So the host need not wait for each one. None where two buffers can't be compared there.
        """
        pairs = zip(self.values(), self.opening, strict=True)
        return [
            (as_integers(now.detach()) != as_integers(opening)).any()
            if isinstance(now, torch.Tensor) and _is_like(now, opening)
            else None
            for now, opening in pairs
        ]

    def put_buffers(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the module use other tensors as its buffers, until `put_back_buffers`."""
        for slots, tensor in zip(self._slots, tensors, strict=True):
            for owner, key in slots:
                owner[key] = tensor

    def values(self) -> list[Any]:
        """Return what the module has as its buffers."""
        return [slots[0][0].get(slots[0][1]) for slots in self._slots]

    def put_back_buffers(self) -> None:
        """Register the replica's own buffer tensors again where a shard has assigned others.

        What a shard has assigned to a buffer (`self.queue = ...`) is its value after the shard, as
        if it had been written into the buffer's own tensor.
        """
        for slots, own in zip(self._slots, self.buffers, strict=True):
            for owner, key in slots:
                owner[key] = own

    def adopt_assigned(self) -> dict[int, torch.Tensor]:
        """Take tensors that were assigned to buffers as the replica's own.

        Returns:
            By the `id` of each tensor before, the one in its place. Empty if one of them differs in
            form or shares memory with others: then other replicas must be made again, too.
        """
        assigned: dict[int, torch.Tensor] = {}
        for number, (slots, own) in enumerate(zip(self._slots, self.buffers, strict=True)):
            now: list[Any] = [owner.get(key) for owner, key in slots]
            if any(one is not own for one in now):
                if any(one is not now[0] for one in now) or not _is_like(now[0], own):
                    return {}
                assigned[number] = now[0]
        if not assigned or not self._lie_apart(assigned):
            return {}
        found = {id(self.buffers[number]): one for number, one in assigned.items()}
        for number, one in assigned.items():
            self.buffers[number] = one
        return found

    def _lie_apart(self, assigned: Mapping[int, torch.Tensor]) -> bool:
        """Whether the tensors share memory with no other buffer, and with no parameter."""
        kept = [one for number, one in enumerate(self.buffers) if number not in assigned]
        every = [*assigned.values(), *kept, *self.parameters]
        places = [one.untyped_storage().data_ptr() for one in every if one.layout is torch.strided]
        mine = places[: len(assigned)]
        return all(places.count(place) == 1 for place in mine)


def _is_like(value: object, own: torch.Tensor) -> bool:
    """Return whether a tensor can take a buffer's place without other replicas noticing."""
    return (
        type(value) is type(own)
        and isinstance(value, torch.Tensor)
        and not (value.requires_grad or value.is_inference())
        and value.layout is own.layout is torch.strided
        and (value.dtype, value.shape, value.device) == (own.dtype, own.shape, own.device)
        and value.stride() == own.stride()
    )


def changed(
    value: object, opening: torch.Tensor, name: str, differs: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Return the value of a buffer after a shard; None if the shard has not changed it."""
    if not isinstance(value, torch.Tensor):
        raise ModelError(
            f"the buffer {name} is {value!r} after forward: a tensor is needed, of the shape that "
            f"it had before; keep what may be missing in an argument or in the batch"
        )
    now = value.detach()
    has_changed = not same_bits(now, opening) if differs is None else bool(differs)
    return now if has_changed else None


def reshaped_error(name: str, before: torch.Tensor, after: torch.Tensor) -> ModelError:
    """Return the error for a buffer that a shard has given a different shape."""
    return ModelError(
        f"the buffer {name} changed its shape from {tuple(before.shape)} to {tuple(after.shape)} "
        f"in forward, but its values in all shards need one shape. If it gets its shape from the "
        f"first batch, as that of an observer, call model(X) once before training; keep a cache in "
        f"a plain attribute"
    )


def devices_of(
    tensors: Sequence[torch.Tensor], modules: Iterable[nn.Module], places: Sequence[Device]
) -> list[Device]:
    """Return the device of each parameter or buffer: that of the first module with it.

    Args:
        tensors: the parameters, or the buffers.
        modules: all modules of the model.
        places: the device of each module.
    """
    if all(place is places[0] for place in places):
        return [places[0]] * len(tensors)
    found: dict[int, Device] = {}
    for module, device in zip(modules, places, strict=True):
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            found.setdefault(id(tensor), device)
    return [found[id(tensor)] for tensor in tensors]


def broadcast(home: Replica, replica: Replica) -> None:
    """Copy the parameters of `home` into a replica with memory of its own.

    From a CPU to an accelerator the copies have not ended on return.
    """
    values: list[torch.Tensor] = [one.detach() for one in home.parameters]
    if home.device.is_accelerator and not replica.device.is_accelerator:
        values = streams.copy_to(values, replica.device)  # one wait for all
    elif replica.device.is_accelerator and not home.device.is_accelerator:
        values = [*map(accelerator.pinned, values)]
    with torch.no_grad():
        copy_all(replica.parameters, values, non_blocking=True)


def note_left(parameters: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Note that the gradients of parameters were used, by a step or by an optimizer's update.

    The next step replaces them, as `zero_grad` would. What is written to them later shows in their
    version counters.

    Returns:
        The gradients, and how often torch has counted writes to each.
    """
    noted: list[tuple[torch.Tensor, int]] = []
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is not None and not gradient.is_inference():
            version = version_of(gradient)
            gradient._left_by_step = id(gradient), version
            noted.append((gradient, version))
    return noted


def is_left(gradient: Any) -> bool:
    """Return whether a gradient was used, and holds nothing that was added to it since."""
    left = getattr(gradient, "_left_by_step", None)
    if left is None or left[0] != id(gradient):  # a copy takes the note with it
        return False
    return bool(left[1] == version_of(gradient)) or not gradient.to_dense().any()


def own_gradients(home: Replica) -> Sequence[torch.Tensor | None]:
    """Return the gradients that the user has put into the parameters since the last update.

    Returns:
        One for each parameter, None where there is none; nothing at all if all are None.

    Raises:
        InputError: one was added to a gradient that had been used.
    """
    found: list[torch.Tensor | None] = []
    for number, parameter in enumerate(home.parameters):
        gradient: Any = parameter.grad
        if gradient is None or is_left(gradient):
            continue
        left = getattr(gradient, "_left_by_step", None)
        if left is not None and left[0] == id(gradient):
            raise InputError(
                f"the gradient of {_name_of(home, number)} still held what the last step or update "
                f"had left there when it was written to: call optimizer.zero_grad() first, before "
                f"backward() of a loss whose gradient the next trainer.step is to add to its own"
            )
        found = found or [None] * len(home.parameters)
        found[number] = gradient.detach()
    return found


def refuse_gradients_in_flight(home: Replica) -> None:
    """Refuse gradients that the user has put into the parameters with a step in flight."""
    for number, gradient in enumerate(own_gradients(home)):
        if gradient is not None:
            raise InputError(
                f"the gradient of {_name_of(home, number)} was set with a step in flight, whose "
                f"update was perhaps not made yet: call trainer.waitall() before you compute "
                f"gradients that trainer.step is to add to its own, or use max_in_flight=1"
            )


def _name_of(replica: Replica, number: int) -> str:
    return replica.names[number]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits: NaN is NaN, and 0.0 is not -0.0."""
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.layout is not torch.strided:
        return all(map(same_bits, strided_parts(one), strided_parts(other)))
    if one.is_floating_point() or one.is_complex():
        one, other = as_integers(one), as_integers(other.to(one.device))
    return torch.equal(one, other.to(one.device))


def strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors that a sparse tensor consists of: its indices, and its values."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [*rows_of(tensor)]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()]


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a dense floating-point or complex tensor as integers; not a copy."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.view(_INTEGERS[tensor.itemsize])


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sum over a dense tensor's bits: a different one after a write, but for coincidences.

    Eight bytes are added at a time, as int64: torch adds narrower integers twenty times slower.
    """
    bits = as_integers(tensor.detach())
    if bits.dtype is torch.int64:  # where signs and exponents change, the upper bits wrap around
        return bits.sum() + (bits >> 20).sum()
    order = sorted(range(bits.dim()), key=bits.stride, reverse=True)
    flat = bits.permute(order).reshape(-1)
    if flat.stride() != (1,):
        flat = flat.clone(memory_format=torch.contiguous_format)
    per_word = 8 // bits.itemsize
    if flat.storage_offset() % per_word:
        return flat.sum(dtype=torch.int64)
    whole = len(flat) - len(flat) % per_word
    words = flat[:whole].view(torch.int64).sum()
    return words if whole == len(flat) else words + flat[whole:].sum(dtype=torch.int64)


_FEW_BYTES = 1 << 12


def sums_of_bits(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the sum of the bits of each dense tensor; those of small tensors at once."""
    found = [0] * len(tensors)
    small: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        is_wide = tensor.itemsize == 8 or tensor.is_complex()  # then the upper bits count, too
        if is_wide or tensor.nbytes > _FEW_BYTES:
            found[number] = int(sum_of_bits(tensor))
        else:
            flat = tensor.detach().reshape(-1)
            small.setdefault((flat.device, flat.dtype), []).append((number, flat))
    for numbered in small.values():
        numbers, parts = zip(*numbered, strict=True)
        bits = as_integers(torch.cat(parts))
        ends = torch.tensor([*itertools.accumulate(map(len, parts))])
        until = bits.cumsum(0, dtype=torch.int64).cpu()
        sums = torch.nn.functional.pad(until, (1, 0))[ends].diff(prepend=ends.new_zeros(1))
        for number, bits_summed in zip(numbers, sums.tolist(), strict=True):
            found[number] = bits_summed
    return found


def _buffer_slots(
    modules: Sequence[nn.Module], buffers: Sequence[torch.Tensor]
) -> list[list[tuple[dict[Any, Any], str]]]:
    """Return, for each distinct buffer, the places in the modules that hold it."""
    places: dict[int, list[tuple[dict[Any, Any], str]]] = {}
    for child in modules if buffers else ():
        for key, buffer in own_buffers(child).items():
            if buffer is not None:
                places.setdefault(id(buffer), []).append((own_buffers(child), key))
    return [places[id(buffer)] for buffer in buffers]
