"""The replicas of the user's model, one or more for each device, kept up to date with it.

The first device's replica is the user's own module (the home). Devices with the same memory share
the storage of the parameters, so that an update reaches all of them; each has its own gradients and
buffers. A device with a different memory (a GPU, or `cpu:1:own`) holds copies.

There is one update, by the user's optimizer; then the new parameters are copied to the other
memories. That moves as many bytes as sending the summed gradients to a replica of the optimizer
would, needs no second optimizer state, works for any optimizer, and copies can't drift apart.

The user's own tensors are computed with only if they begin at multiples of 64 bytes. Where they
don't, and something else holds their memory, every device computes on copies.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from evenstep.devices import Device, StagedDevice
from evenstep.devices.accelerator import ignoring_failed
from evenstep.devices.addresses import align, are_aligned, has_foreign_attributes, rounding
from evenstep.devices.process_wide import no_collection
from evenstep.engine import streams
from evenstep.errors import ContractError, InputError, ModelError, add_note
from evenstep.private_torch.modules import (
    backward_hooks,
    backward_pre_hooks,
    forward_hooks,
    forward_pre_hooks,
    gradient_hooks,
    own_buffers,
    own_modules,
    own_parameters,
    sum_hooks,
)
from evenstep.private_torch.tensors import copy_all, version_of
from evenstep.replicas.buffer_rules import buffer_rules
from evenstep.replicas.checks import (
    Members,
    refuse_aliases,
    refuse_buffers_in_closures,
    refuse_hooks_on_nodes,
    refuse_hooks_on_sums,
    refuse_unwritable,
    written_error,
)
from evenstep.replicas.computed_before import ComputedBefore
from evenstep.replicas.copying import copy_module, copy_parameter, move_buffers
from evenstep.replicas.module_sync import Difference, ModuleWatch
from evenstep.replicas.replica import Replica, broadcast, devices_of, sum_of_bits

_VERSION = operator.attrgetter("_version")


class Replicas:
    """The replicas of one model over all devices.

    Args:
        model: the user's module.
        devices: the devices; the module is on the first one.
        home_computes: whether the first device may compute on the user's module. False gives it a
            copy that shares the parameters' memory; then the shards of a step in flight don't see
            the user's changes to gradients or training flags.
        in_flight: whether the user's thread goes on while shards are computed, and might write to
            the parameters. Only then are writes past torch's version counters looked for.
        per_device: the number of replicas for each device.
        buffers: rules for buffers that shards change, by their names.
        stages_of: returns the stage of every module of a model, in the order of `modules()`, where
            a copy lies on several accelerators.

    Attributes:
        home: the replica that is the user's module; the update is done there.
        all: the first replica of every device, then the second of every device, and so on.
        copies: one replica for each memory besides the home's; it gets the new parameters.
        hooked: the numbers and names of the parameters with gradient hooks. Then no device computes
            on the user's module: the hooks are for the mean gradient, not for each shard's.
        structure: the model's layers, parameters, buffers and hooks; a new object after a change,
            and where an attribute was set to a function.
        computed: the tensors with a graph in attributes of the model, which shards must not use.
        forward_writes: whether shards may change attributes of the user's module.
        held_elsewhere: the names of the parameters and buffers that don't begin at multiples of 64
            bytes, in memory that something else may hold. Then all devices compute on copies.
        on_build: called when all replicas were made again.
        were_rebuilt: whether `refresh` has made all replicas again since this was last reset.
    """

    def __init__(
        self,
        model: nn.Module,
        devices: Sequence[Device],
        *,
        home_computes: bool = True,
        in_flight: bool = False,
        per_device: int = 1,
        buffers: Mapping[str, str] | None = None,
        stages_of: Callable[[nn.Module], Sequence[int]] | None = None,
    ) -> None:
        self._model = model
        self._lanes = len(devices)
        self._devices = (*devices,) * per_device
        self._home_may_compute = home_computes
        # On accelerators, the host would have to wait for the sums.
        self._sums_bits = in_flight and not devices[0].is_accelerator
        self._given_rules = buffers or {}
        self._stages_of = stages_of
        self._lost: frozenset[int] = frozenset()
        self.were_rebuilt = False
        self._keeps_looking = False
        self.on_build: Callable[[], object] = _nothing
        self._build()
        self.forward_writes = self._home_computes and self._watch is not None

    def rebuild(self) -> None:
        """Make all copies again, in the layout that the user's weights have now."""
        self._build()

    def hooks_now(self) -> Mapping[int, Sequence[Callable[..., Any]]]:
        """Return the hooks that parameters' gradients pass, by the parameters' numbers."""
        parameters = self.home.parameters
        return {i: [*(gradient_hooks(parameters[i]) or {}).values()] for i, _ in self.hooked}

    @torch.inference_mode(False)
    def _build(self) -> None:
        model = self._model
        members = Members.of(model)
        refuse_hooks_on_sums(members)
        refuse_unwritable(members)
        refuse_aliases(members)
        named = enumerate(members.parameters)
        self.hooked = [(number, name) for number, (name, one) in named if gradient_hooks(one)]
        self._owners: dict[str, Replica] = {}  # by memory: whose parameters others share
        is_aligned = self._align_home(members)
        self._home_computes = is_aligned and self._home_may_compute and not self.hooked
        names = [name for name, _ in members.buffers]
        self._rules = buffer_rules(model, names, self._given_rules)
        home = self._devices[0].parts[0]
        self.home = Replica(home, model, rules=self._rules, members=members)
        self._stages = self._stages_of(model) if self._stages_of is not None else ()
        self.all = [self.home] if self._home_computes else []
        if not self._stay.intersection(map(id, self.home.parameters)):
            self._owners[self.home.device.memory] = self.home
        try:
            for device in self._devices[len(self.all) :]:
                self._add(device)
        except ModelError as error:
            if not is_aligned:
                odd = ", ".join(self.held_elsewhere[:3]) or "a tensor in an attribute"
                add_note(
                    error,
                    f"every device needs a copy, since {odd} doesn't begin at a multiple of 64 "
                    f"bytes, in memory that something else may hold: put a clone() in its place",
                )
            raise
        self._others = [replica for replica in self.all if replica is not self.home]
        if self._others:
            refuse_buffers_in_closures(members)
        here = self.home.device.memory
        self._elsewhere = [replica for replica in self.all if replica.device.memory != here]
        distinct = dict.fromkeys((self.home, *self._owners.values()))
        self._distinct = [one for replica in distinct for one in replica.parameters]
        self._modules = [list(replica.module.modules()) for replica in self._others]
        self._find_copies()
        self._home_modules = [one for _, one in members.modules]
        self.on_build()  # refused, it is asked again
        self.structure = _structure(self._home_modules, self.home.parameters)
        self._forms = forms_of(self.home.parameters)
        self._watch = (
            ModuleWatch(model, keeps_results=self._home_computes) if self._others else None
        )
        self.computed = ComputedBefore(self._home_modules)
        self._has_seen_nodes = False
        self._synchronised: list[tuple[int, int]] = []
        self._bits: torch.Tensor | None = None
        self._note_places()

    def _align_home(self, members: Members) -> bool:
        """Move parameters and buffers to multiples of 64 bytes, where nothing can notice it.

        Returns:
            Whether all that the module's products read begins there.
        """
        held = rounding(one for _, one in members.tensors)
        self._stay = {*map(id, align(held))}
        self.held_elsewhere = [name for name, one in members.tensors if id(one) in self._stay]
        modules = (one for _, one in members.modules)
        return not self._stay and not has_foreign_attributes(modules)

    def _note_places(self) -> None:
        """Note which of the user's own tensors devices compute with."""
        shares = self._owners.get(self.home.device.memory) is self.home
        parameters = self.home.parameters if shares else ()
        self._placed = rounding((*parameters, *(self.home.buffers if self._home_computes else ())))

    def _build_again(self) -> None:
        """Make all replicas again from the module as the user has changed it."""
        self._build()
        self.were_rebuilt = True
        self._keeps_looking = True  # perhaps it was a shard, not the user
        self.forward_writes = self._home_computes and self._watch is not None

    def fresh_copy(self, replica: Replica) -> Replica:
        """Return a new copy of a replica on its device, which shares the parameters' memory.

        Raises:
            ModelError: the module can't be copied.
        """
        copied = self._copied(replica, replica.device, share=True)
        copied.opening = replica.opening
        return copied

    def of_lane(self, lane: int, number: int = 0) -> Replica:
        """Return replica `number` of a device, which has the opening values; called in its lane."""
        replica = self.all[number * self._lanes + lane]
        if replica.given is not None:
            replica.take_given()
        return replica

    @property
    def on_cpus(self) -> bool:
        """Whether every device is a CPU."""
        return not any(device.is_accelerator for device in self._devices)

    def refresh(self) -> bool:
        """Bring every replica up to date with the user's module.

        Storage that was swapped is shared again, `requires_grad` and attributes with plain values
        or tensors (a training flag, a dropout rate, a function, a mask) are copied; after every
        other change (of layers, hooks, objects, classes, of a parameter's dtype, shape or strides)
        all replicas are made again.

        Returns:
            Whether the copies are stale, because the parameters were written since
            `mark_synchronised`.
        """
        self.computed.show()
        difference = self._difference()
        if difference is not None and difference.needs_rebuild and self._take_over():
            difference = self._difference()
        if difference is not None:
            self._follow(difference)
        for update in self._updates():
            update()
        if self.computed.are_others():
            devices = [replica.device for replica in self._others]
            self.computed.follow(zip(self._modules, devices, strict=True))
        if not self._has_seen_nodes:  # when the first step begins: opening stays quick
            with no_collection():
                refuse_hooks_on_nodes(self.home.names, self.home.parameters)
            self._has_seen_nodes = True
        if not self.copies:
            self.mark_synchronised()
        return bool(self.copies) and self._synchronised != self._home_versions()

    @property
    def is_outdated(self) -> bool:
        """Whether the user has changed the module since `refresh`."""
        return (
            self._difference() is not None
            or any(True for _ in self._updates())
            or self.computed.are_others()
        )

    def adopt_buffers(self) -> bool:
        """Take tensors that the user has assigned to buffers; return whether there were any.

        Other replicas have buffers of their own, which get the values when a shard opens.
        """
        found = self.home.adopt_assigned()
        if found:
            self.structure[:] = [found.get(id(part), part) for part in self.structure]
            self._note_places()
        return bool(found)

    def _take_over(self) -> bool:
        """Adopt buffers, and align what devices compute with; return whether there was any."""
        adopted, lay_aligned = self.adopt_buffers(), are_aligned(self._placed)
        align(self._placed)
        return adopted or not lay_aligned

    @torch.inference_mode(False)
    def _follow(self, difference: Difference) -> None:
        if difference.needs_rebuild:
            self._build_again()
        elif self._watch is not None:
            for attribute in difference.attributes:
                for replica, modules in zip(self._others, self._modules, strict=True):
                    place = replica.module_devices[attribute.module]
                    self._watch.carry(attribute, modules[attribute.module], place)
            if self._watch.has_functions(difference):  # which may refer to the module itself
                self.structure = [*self.structure]
            self._watch.look()

    def _difference(self) -> Difference | None:
        """Return what the user has changed in the module since `refresh`."""
        if (
            not self._has_its_parts
            or self._forms != forms_of(self.home.parameters)
            or not are_aligned(self._placed)
        ):
            return Difference(needs_rebuild=True)
        return None if self._watch is None else self._watch.difference()

    @property
    def _has_its_parts(self) -> bool:
        """Whether the module has the layers, parameters, buffers and hooks of `structure`."""
        now = _structure(self._home_modules, self.home.parameters)
        return len(now) == len(self.structure) and all(map(operator.is_, now, self.structure))

    def watched_attributes(self, hook: str) -> Callable[[], None]:
        """Return what refuses attributes and parts of the module that are set until it is called.

        The shards of the next step in flight compute on copies, which would have the old ones. It
        raises a ContractError that names the attributes.

        Args:
            hook: what the user calls the function that is called meanwhile.
        """
        watch = self._watch
        if watch is None or watch.difference() is not None:  # the user has changed others
            watch = ModuleWatch(self.home.module, keeps_results=False)

        had_its_parts = self._has_its_parts

        def refuse_changes() -> None:
            difference = watch.difference()
            has_other_parts = had_its_parts and not self._has_its_parts
            if has_other_parts or difference is not None:
                names = ", ".join(watch.names(difference)) if difference else ""
                names = names or "what an attribute holds"
                if has_other_parts:
                    names = "the layers, the hooks, or the shape or dtype of a buffer"
                raise ContractError(
                    f"{hook} has changed {names} of the module with a step in flight, whose shards "
                    f"would see it too late: register a buffer, keep it outside of the module if "
                    f"no shard reads it, or use max_in_flight=1"
                )

        return refuse_changes

    def _look_after_shards(self) -> None:
        """Take what shards have changed in the home's attributes as no change of the user's.

        Given up after a step without any, since most models have none; kept up once there were
        some, since not every step need have them.
        """
        assert self._watch is not None
        self._keeps_looking |= self._watch.difference() is not None
        self.forward_writes = self._keeps_looking
        self._watch.look()

    def _updates(self) -> Iterator[Callable[[], object]]:
        """Yield a function for each parameter that differs from the home's; it removes that."""
        for replica in self._others:
            owner = self._owners[replica.device.memory]
            if owner is not replica:
                for parameter, source in zip(replica.parameters, owner.parameters, strict=True):
                    if parameter.data_ptr() != source.data_ptr():
                        yield functools.partial(setattr, parameter, "data", source.detach())
            for parameter, source in zip(replica.parameters, self.home.parameters, strict=True):
                if parameter.requires_grad != source.requires_grad:
                    yield functools.partial(parameter.requires_grad_, source.requires_grad)

    def drop_lanes(self, lost: frozenset[int]) -> bool:
        """Stop using the replicas of lost lanes; return False if training needs them.

        Training needs the device that holds the user's module, unless the module is in the CPU's
        memory and the device computes on a copy. It needs all devices where each has several
        replicas.
        """
        needs_home = self._home_computes or self.home.device.is_accelerator
        if len(lost) >= len(self.all) or len(self.all) > self._lanes or (0 in lost and needs_home):
            return False
        self._lost = lost
        self._find_copies()
        return True

    def _find_copies(self) -> None:
        used = [replica for lane, replica in enumerate(self.all) if lane not in self._lost]
        owners = dict.fromkeys(self._owners[one.device.memory] for one in used)
        self.copies = [owner for owner in owners if owner is not self.home]

    def update_copies(self) -> None:
        """Copy the updated parameters to every memory that holds copies of them.

        An accelerator that has failed gets none, and computes nothing with the old ones either.
        """
        for replica in self.copies:
            with ignoring_failed(*(part.torch_device for part in replica.device.parts)):
                broadcast(self.home, replica)
        if not self.home.device.is_accelerator:
            for replica in self.copies:
                with ignoring_failed(replica.device.torch_device):
                    streams.finish(streams.fences_here([replica.device]))
        self.mark_synchronised()

    def mark_synchronised(self) -> None:
        """Note that every copy now equals the home's parameters."""
        if self.copies or not self._home_computes:
            self._synchronised = self._home_versions()
        if self._sums_bits:
            self._bits = self._sums_of_bits()

    def refuse_written(self) -> None:
        """Refuse parameters and buffers that were written to since `mark_synchronised`.

        Writes past the version counters (`parameter.data`, numpy) change the sums of their bits.

        Raises:
            InputError: the user wrote to them while a step was in flight.
        """
        if self._were_written:
            self.mark_written()
            raise InputError(
                "the parameters or buffers were written to while a step was in flight: call "
                "trainer.waitall() before you change the model, or use max_in_flight=1"
            )

    @property
    def _were_written(self) -> bool:
        if not self._synchronised:
            return False
        if self._synchronised != self._home_versions():
            return True
        return self._bits is not None and not torch.equal(self._bits, self._sums_of_bits())

    def mark_written(self) -> None:
        """Note that the user may write to the parameters, even past the version counters."""
        self._synchronised = []
        self._bits = None

    def open_step(self) -> None:
        """Take the home's buffers as the opening values of every replica.

        Lanes copy them to other memories themselves, behind their own kernels.
        """
        if self.computed.found:
            for modules in [self._home_modules] * self._home_computes + self._modules:
                self.computed.hide(modules)
        opening = [buffer.detach().clone() for buffer in self.home.buffers]
        self._opened = [*map(_VERSION, self._distinct)]
        # Its kernels may have been launched only, and its memory may be of the caller's stream.
        self._opening_before = self.home.opening
        self.home.opening = opening
        for replica in self.all:
            replica.opening, replica.graph_nodes = opening, -1
        for replica in self._elsewhere:
            replica.given = opening

    @property
    def were_written_since_open(self) -> bool:
        """Whether parameters were written since `open_step`, as torch's version counters say."""
        return [*map(_VERSION, self._distinct)] != self._opened

    def refuse_written_by_shards(self) -> None:
        """Refuse parameters that shards have written since `open_step`.

        Raises:
            ContractError: names them.
        """
        now = [*map(_VERSION, self._distinct)]
        if now != self._opened:
            names = itertools.cycle(name for name, _ in self.home.module.named_parameters())
            pairs = zip(names, now, self._opened, strict=False)
            written = dict.fromkeys(name for name, late, early in pairs if late != early)
            raise written_error([*written])

    def close_step(self, closing: Sequence[torch.Tensor | None]) -> None:
        """Write the buffers' closing values into the user's module (None: the opening value)."""
        self.computed.show()
        if self.forward_writes:
            self._look_after_shards()
        if self.home.buffers:
            pairs = zip(self.home.opening, closing, strict=True)
            self.write_buffers([opening if value is None else value for opening, value in pairs])

    def write_buffers(self, values: Sequence[torch.Tensor | None]) -> None:
        """Write values into the buffers of the user's module (None: leave it as it is)."""
        pairs = zip(self.home.buffers, values, strict=True)
        written = [(buffer, value) for buffer, value in pairs if value is not None]
        if written:
            with torch.no_grad():
                copy_all(*map(list, zip(*written, strict=True)))

    def restore_opening(self) -> None:
        """Reset the buffers of the user's module to the step's opening values."""
        with ignoring_failed(self.home.device.torch_device):
            self.close_step([None] * len(self.home.buffers))

    def forget_objective(self) -> None:
        """Forget what backward passes have shown: the next one is of a different objective."""
        for replica in self.all:
            replica.has_run_backward = replica.has_accumulated = False

    def abandon_step(self) -> None:
        """Leave the user's module as `open_step` found it, without gradients."""
        for replica in {*self.all, self.home}:
            replica.put_back_buffers()
            with ignoring_failed(*(part.torch_device for part in replica.device.parts)):
                replica.put_back_shapes()
        is_synchronised = bool(self._synchronised) and not self._were_written
        self.restore_opening()
        if is_synchronised:
            self.mark_synchronised()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Leave no gradient in the user's module and its copies."""
        for replica in (self.home, *self._others):
            for parameter in replica.parameters:
                parameter.grad = None

    def _add(self, device: Device) -> None:
        owner = self._owners.get(device.memory)
        replica = self._copied(owner or self.home, device, share=owner is not None)
        self._owners.setdefault(device.memory, replica)
        self.all.append(replica)

    def _copied(self, source: Replica, device: Device, *, share: bool) -> Replica:
        """Return a copy of a replica on `device`, which may share the parameters' memory."""
        places: Sequence[Device] = ()
        if isinstance(device, StagedDevice):
            places = [device.stages[stage] for stage in self._stages]
        seats = devices_of(source.parameters, source.module.modules(), places or [device])
        parameters = {
            id(parameter): copy_parameter(parameter, place, share=share)
            for parameter, place in zip(source.parameters, seats, strict=True)
        }
        module = copy_module(source.module, parameters)
        if places and not share:
            move_buffers(module, places)
        elif not share:
            module = module.to(device.torch_device)
        align(rounding(module.buffers()))
        outer = frozenset(map(id, self.home.parameters))
        return Replica(device, module, outer, self._rules, places)

    def _sums_of_bits(self) -> torch.Tensor:
        held = (*self.home.parameters, *self.home.buffers)
        sums = [sum_of_bits(one) for one in held if one.layout is torch.strided]
        return torch.stack(sums).cpu() if sums else torch.zeros(0)

    def _home_versions(self) -> list[tuple[int, int]]:
        buffers = () if self._home_computes else self.home.buffers
        return [(version_of(one), one.data_ptr()) for one in (*self.home.parameters, *buffers)]


def _nothing() -> None:
    """Stand for what nobody has asked to be called."""


def forms_of(parameters: Iterable[torch.Tensor]) -> list[object]:
    """Return what copies must have in common with parameters: dtypes, shapes and layouts."""
    parameters = [*parameters]
    return [*map(_DTYPE_AND_SHAPE, parameters), *map(_STRIDES, parameters)]


_DTYPE_AND_SHAPE = operator.attrgetter("dtype", "shape")
_STRIDES = operator.methodcaller("stride")


def _structure(modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> list[object]:
    """Return objects that are others when the model's layers, parameters, buffers or hooks change.

    A `forward` that is set on a module itself is part of it.

    They are kept, so that no new one can have the `id` of an old one.
    """
    found: list[object] = []
    for module in modules:
        found.append(module.__class__)
        found.append(module.__dict__.get("forward"))
        for parts in (own_modules(module), own_parameters(module), own_buffers(module)):
            if parts:
                found += parts
                found += parts.values()
        for hooks in (forward_hooks, forward_pre_hooks, backward_hooks, backward_pre_hooks):
            if of_module := hooks(module):
                found += of_module.values()
    for parameter in parameters:
        found += (gradient_hooks(parameter) or {}).values()
        found += (sum_hooks(parameter) or {}).values()
    return found
