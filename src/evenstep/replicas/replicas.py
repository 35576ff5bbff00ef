"""Replicas: one copy of the user's model for each device.

The first device's replica is the user's own module. Devices with the same memory share the storage
of the parameters, so that an update reaches them at once; each has gradients and buffers of its
own. A device with another memory (a GPU, or `cpu:1:own`) holds copies.

There is one update and one optimizer, the user's: the other memories then get the new parameters.
That moves as many bytes as giving every memory the summed gradients for an optimizer replica would,
needs no second optimizer state, holds for any optimizer, and copies can't drift apart.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from evenstep.devices import Device, carry
from evenstep.errors import InputError, ModelError
from evenstep.replicas.module_sync import carry_over_attributes, gradient_hooks
from evenstep.replicas.replica import Replica


class Replicas:
    """The replicas of one model over all devices.

    Args:
        model: the user's module.
        devices: the first one is where the module is.
        apart: whether the first device too computes on a copy of the module (with the same
            parameters in memory). Then what the user does to the module, to its gradients or
            training flags, doesn't reach the shards of a step in flight.
        abreast: how many shards each device has under way at once, with a replica for each.

    Attributes:
        home: the replica that is the user's module; the update is done there.
        all: one replica for each device, then what `abreast` asks for besides; without `apart`
            the first is home.
        copies: the replicas that hold copies of the home's parameters in a memory of their own.
        have_followed: whether `follow_home` has found the module changed, since this was unset.
    """

    def __init__(
        self,
        model: nn.Module,
        devices: Sequence[Device],
        *,
        apart: bool = False,
        abreast: int = 1,
    ) -> None:
        self._model = model
        self._lanes = len(devices)
        self._devices = (*devices,) * abreast
        self._apart = apart
        self._lost: frozenset[int] = frozenset()
        self.have_followed = False
        self._build()

    def _build(self) -> None:
        model = self._model
        _refuse_hooks_on_sums(model)
        self.home = Replica(self._devices[0], model)
        self.all = [] if self._apart else [self.home]
        self._owners = {self.home.device.memory: self.home}  # who holds a memory's parameters
        for device in self._devices[len(self.all) :]:
            self._add(device)
        self._others = [replica for replica in self.all if replica is not self.home]
        self._pairs = [
            (mine.__dict__, its.__dict__, replica.device)
            for replica in self._others
            for mine, its in zip(model.modules(), replica.module.modules(), strict=True)
        ]
        self._find_copies()
        self._modules = list(model.modules())
        self._structure = _structure(self._modules, self.home.parameters)
        self._synchronised: list[tuple[int, int]] = []

    def abreast(self, lane: int, place: int) -> Replica:
        """Return the replica for the shard that is number `place` of those a device has at once."""
        return self.all[place * self._lanes + lane]

    @property
    def on_cpus(self) -> bool:
        """Whether every device is a CPU."""
        return all(device.kind == "cpu" for device in self._devices)

    def follow_home(self) -> bool:
        """Bring every replica up to what the user has done to the module since the last step.

        Training flags and plain attributes (a dropout rate, a temperature, a mask) are carried
        over, as is `requires_grad`; storage that was swapped is shared anew; after a change of
        layers or hooks the replicas are made again. Says whether there are copies that are stale,
        because somebody wrote the parameters since `mark_synchronised`.
        """
        if self._structure != _structure(self._modules, self.home.parameters):
            self._build()
            self.have_followed = True
        for bring_over in self._differences():
            bring_over()
            self.have_followed = True
        if not self.copies:
            self.mark_synchronised()
        return bool(self.copies) and self._synchronised != self._home_versions()

    @property
    def is_behind(self) -> bool:
        """Whether the user has changed the module since `follow_home`; nothing is done about it."""
        if self._structure != _structure(self._modules, self.home.parameters):
            return True
        return any(True for _ in self._differences())

    def _differences(self) -> Iterator[Callable[[], object]]:
        """Yield, for each thing in which a replica is behind the home, what brings it over."""
        for mine, its, device in self._pairs:
            yield from carry_over_attributes(mine, its, device)
        for replica in self._others:
            owner = self._owners[replica.device.memory]
            if owner is not replica:
                for parameter, source in zip(replica.parameters, owner.parameters, strict=True):
                    if parameter.data_ptr() != source.data_ptr():
                        yield functools.partial(_share, parameter, source)
            for parameter, source in zip(replica.parameters, self.home.parameters, strict=True):
                if parameter.requires_grad != source.requires_grad:
                    yield functools.partial(parameter.requires_grad_, source.requires_grad)

    def can_do_without(self, lost: frozenset[int]) -> bool:
        """Say whether training can go on without the devices of some lanes, and give them up.

        It can't without the one that holds the user's module, unless that is in the CPU's memory
        and its lane computes on a copy; nor where each device has a replica for each of its shards.
        """
        if len(lost) >= len(self.all) or len(self.all) > self._lanes:
            return False
        if 0 in lost and not (self._apart and self.home.device.kind == "cpu"):
            return False
        self._lost = lost
        self._find_copies()
        return True

    def _find_copies(self) -> None:
        self.copies = [
            replica
            for lane, replica in enumerate(self.all)
            if lane not in self._lost
            and self._owners[replica.device.memory] is replica
            and replica is not self.home
        ]

    def mark_synchronised(self) -> None:
        """Note that every copy now equals the home's parameters."""
        if self.copies or self._apart:
            self._synchronised = self._home_versions()

    def refuse_written(self) -> None:
        """Refuse parameters and buffers that somebody wrote since `mark_synchronised`.

        Raises:
            InputError: somebody did, while a step was in flight.
        """
        if self._were_written:
            raise InputError(
                "the parameters or buffers were written to while a step was in flight: call "
                "trainer.waitall() before you change the model, or use max_in_flight=1"
            )

    @property
    def _were_written(self) -> bool:
        return bool(self._synchronised) and self._synchronised != self._home_versions()

    def mark_touched(self) -> None:
        """Note that somebody may have written the home's parameters, in whatever way."""
        self._synchronised = []

    def open_step(self) -> None:
        """Take the home's buffers as the step's opening values, for every replica."""
        opening = [buffer.detach().clone() for buffer in self.home.buffers]
        per_memory = {self.home.device.memory: opening}
        self.home.opening = opening
        for lane, replica in enumerate(self.all):
            if lane in self._lost:
                continue
            memory = replica.device.memory
            if memory not in per_memory:
                per_memory[memory] = [carry(value, replica.device) for value in opening]
            replica.opening = per_memory[memory]

    def close_step(self, closing: Sequence[torch.Tensor | None]) -> None:
        """Write the step's closing values into the user's module (None: the opening value)."""
        home = self.home
        if home.buffers:
            values = [
                before if after is None else after
                for before, after in zip(home.opening, closing, strict=True)
            ]
            with torch.no_grad():
                torch._foreach_copy_(home.buffers, values)

    def restore_opening(self) -> None:
        """Give the user's module the step's opening values back."""
        self.close_step([None] * len(self.home.buffers))

    def abandon_step(self) -> None:
        """Leave the user's module as `open_step` found it, without gradients."""
        is_synchronised = bool(self._synchronised) and not self._were_written
        self.restore_opening()
        if is_synchronised:
            self.mark_synchronised()
        for replica in (self.home, *self._others):
            for parameter in replica.parameters:
                parameter.grad = None

    def _add(self, device: Device) -> None:
        owner = self._owners.get(device.memory)
        source = owner or self.home
        parameters = {
            id(parameter): _copy_parameter(parameter, device, share=owner is not None)
            for parameter in source.parameters
        }
        module = _copy_module(source.module, parameters)
        module = module if owner else module.to(device.torch_device)
        replica = Replica(device, module, copied=self._model)
        self._owners.setdefault(device.memory, replica)
        self.all.append(replica)

    def _home_versions(self) -> list[tuple[int, int]]:
        written = (
            [*self.home.parameters, *self.home.buffers] if self._apart else (self.home.parameters)
        )
        return [(values._version, values.data_ptr()) for values in written]


def _structure(
    modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]
) -> tuple[list[Any], list[Any]]:
    """Return what changes when layers, parameters, buffers or hooks of a model change."""
    return [
        (
            *map(id, module._modules.values()),
            *map(id, module._parameters.values()),
            *map(id, module._buffers.values()),
            *(module._forward_hooks | module._forward_pre_hooks | module._backward_hooks),
        )
        for module in modules
    ], [
        (*(parameter._backward_hooks or ()), bool(parameter._post_accumulate_grad_hooks))
        for parameter in parameters
    ]


def check_trainable(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what can't be trained, before anything is changed.

    Raises:
        ModelError: lazy parameters, hooks on accumulated gradients, or an optimizer with parameters
            that the model doesn't have.
    """
    _refuse_hooks_on_sums(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise ModelError(
                f"the parameter {name} has no shape yet: run one batch through the model first"
            )
    known = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in known for parameter in held)
    if strangers:
        raise ModelError(
            f"the optimizer holds {strangers} of {len(held)} parameters that are not the model's: "
            f"make it from model.parameters(), after the last change to the model"
        )


def move_home(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: Device, *, channels_last: bool
) -> None:
    """Bring the user's model, and what the optimizer holds for it, to `device` (in place)."""
    target = device.torch_device
    if any(parameter.device != target for parameter in model.parameters()):
        model.to(target)
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim > 0:
                    state[key] = value.to(target)
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _copy_parameter(parameter: nn.Parameter, device: Device, *, share: bool) -> nn.Parameter:
    data = parameter.detach() if share else carry(parameter, device)
    hooks = gradient_hooks(parameter)
    replica = nn.Parameter(data, requires_grad=bool(hooks) or parameter.requires_grad)
    replica.__dict__.update(parameter.__dict__)
    for hook in hooks.values():
        replica.register_hook(hook)
    replica.requires_grad_(parameter.requires_grad)
    return replica


def _copy_module(module: nn.Module, parameters: dict[int, nn.Parameter]) -> nn.Module:
    try:
        return copy.deepcopy(module, dict(parameters))
    except Exception as error:
        raise ModelError(
            f"the model {type(module).__name__} can't be copied for a second device: "
            f"copy.deepcopy(model) fails with {type(error).__name__}: {error}. Keep locks, files "
            f"and computed tensors out of its attributes (or give it __deepcopy__), or train on "
            f"one device"
        ) from error


def _share(parameter: nn.Parameter, source: nn.Parameter) -> None:
    parameter.data = source.detach()


def _refuse_hooks_on_sums(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise ModelError(
                f"the parameter {name} has a hook on its accumulated gradient, which would see "
                f"sums of some shards: work on the mean gradient in before_update=..., or use "
                f"register_hook"
            )
