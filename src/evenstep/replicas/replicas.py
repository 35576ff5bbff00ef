"""The replicas of the user's model, one or more for each device, kept up to date with it.

The first device's replica is the user's own module (the home). Devices with the same memory share
the storage of the parameters, so that an update reaches all of them; each has its own gradients and
buffers. A device with another memory (a GPU, or `cpu:1:own`) holds copies.

There is one update, by the user's optimizer; then the new parameters are copied to the other
memories. That moves as many bytes as sending the summed gradients to a replica of the optimizer
would, needs no second optimizer state, works for any optimizer, and copies can't drift apart.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import nn

from evenstep.devices import Device, carry
from evenstep.errors import ContractError, InputError, ModelError
from evenstep.replicas.buffer_rules import buffer_rules
from evenstep.replicas.module_sync import attribute_updates
from evenstep.replicas.replica import Replica

_VERSION = operator.attrgetter("_version")


class Replicas:
    """The replicas of one model over all devices.

    Args:
        model: the user's module.
        devices: the devices; the module is on the first one.
        home_computes: whether the first device may compute on the user's module. False gives it a
            copy that shares the parameters' memory; then the shards of a step in flight don't see
            the user's changes to gradients or training flags.
        per_device: the number of replicas for each device.
        buffers: rules for buffers that shards change, by their names.

    Attributes:
        home: the replica that is the user's module; the update is done there.
        all: the first replica of every device, then the second of every device, and so on.
        copies: one replica for each memory besides the home's; it gets the new parameters.
        hooked: the numbers and names of the parameters with gradient hooks. Then no device computes
            on the user's module: the hooks are for the mean gradient, not for each shard's.
        structure: the model's layers, parameters, buffers and hooks; a new object after a change.
        was_refreshed: whether `refresh` has found the module changed since this was last reset.
    """

    def __init__(
        self,
        model: nn.Module,
        devices: Sequence[Device],
        *,
        home_computes: bool = True,
        per_device: int = 1,
        buffers: Mapping[str, str] | None = None,
    ) -> None:
        self._model = model
        self._lanes = len(devices)
        self._devices = (*devices,) * per_device
        self._home_may_compute = home_computes
        self._given_rules = buffers or {}
        self._lost: frozenset[int] = frozenset()
        self.was_refreshed = False
        self._build()

    def rebuild(self) -> None:
        """Make all copies again, in the layout that the user's weights have now."""
        self._build()

    def _build(self) -> None:
        model = self._model
        _refuse_hooks_on_sums(model)
        named = enumerate(model.named_parameters())
        self.hooked = [(number, name) for number, (name, one) in named if one._backward_hooks]
        self._home_computes = self._home_may_compute and not self.hooked
        self._rules = buffer_rules(model, self._given_rules)
        self.home = Replica(self._devices[0], model, rules=self._rules)
        self.all = [self.home] if self._home_computes else []
        self._owners = {self.home.device.memory: self.home}  # whose parameters others share
        for device in self._devices[len(self.all) :]:
            self._add(device)
        self._others = [replica for replica in self.all if replica is not self.home]
        self._pairs = [
            (mine.__dict__, its.__dict__, replica.device)
            for replica in self._others
            for mine, its in zip(model.modules(), replica.module.modules(), strict=True)
        ]
        self._distinct = [one for owner in self._owners.values() for one in owner.parameters]
        self._find_copies()
        self._modules = list(model.modules())
        self.structure = _structure(self._modules, self.home.parameters)
        self._synchronised: list[tuple[int, int]] = []

    def of_lane(self, lane: int, number: int) -> Replica:
        """Return replica `number` of a device."""
        return self.all[number * self._lanes + lane]

    @property
    def on_cpus(self) -> bool:
        """Whether every device is a CPU."""
        return all(device.kind == "cpu" for device in self._devices)

    def refresh(self) -> bool:
        """Bring every replica up to date with the user's module.

        Training flags, plain attributes (a dropout rate, a temperature, a mask) and `requires_grad`
        are copied; storage that was swapped is shared again; after a change of layers or hooks, all
        replicas are made again.

        Returns:
            Whether the copies are stale, because the parameters were written since
            `mark_synchronised`.
        """
        if self._structure_changed:
            self._build()
            self.was_refreshed = True
        for update in self._updates():
            update()
            self.was_refreshed = True
        if not self.copies:
            self.mark_synchronised()
        return bool(self.copies) and self._synchronised != self._home_versions()

    @property
    def is_outdated(self) -> bool:
        """Whether the user has changed the module since `refresh`."""
        return self._structure_changed or any(True for _ in self._updates())

    @property
    def _structure_changed(self) -> bool:
        return self.structure != _structure(self._modules, self.home.parameters)

    def _updates(self) -> Iterator[Callable[[], object]]:
        """Yield a function for each difference between a replica and the home; it removes it."""
        for mine, its, device in self._pairs:
            yield from attribute_updates(mine, its, device)
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
        needs_home = self._home_computes or self.home.device.kind != "cpu"
        if len(lost) >= len(self.all) or len(self.all) > self._lanes or (0 in lost and needs_home):
            return False
        self._lost = lost
        self._find_copies()
        return True

    def _find_copies(self) -> None:
        used = [replica for lane, replica in enumerate(self.all) if lane not in self._lost]
        owners = [one for one in used if self._owners[one.device.memory] is one]
        self.copies = [owner for owner in owners if owner is not self.home]

    def mark_synchronised(self) -> None:
        """Note that every copy now equals the home's parameters."""
        if self.copies or not self._home_computes:
            self._synchronised = self._home_versions()

    def refuse_written(self) -> None:
        """Refuse parameters and buffers that were written to since `mark_synchronised`.

        Raises:
            InputError: the user wrote to them while a step was in flight.
        """
        if self._were_written:
            raise InputError(
                "the parameters or buffers were written to while a step was in flight: call "
                "trainer.waitall() before you change the model, or use max_in_flight=1"
            )

    @property
    def _were_written(self) -> bool:
        return bool(self._synchronised) and self._synchronised != self._home_versions()

    def mark_written(self) -> None:
        """Note that the user may write to the parameters, even past the version counters."""
        self._synchronised = []

    def open_step(self) -> None:
        """Take the home's buffers as the opening values of every replica."""
        opening = [buffer.detach().clone() for buffer in self.home.buffers]
        self._opened = [*map(_VERSION, self._distinct)]
        per_memory = {self.home.device.memory: opening}
        self.home.opening = opening
        for lane, replica in enumerate(self.all):
            if lane in self._lost:
                continue
            memory = replica.device.memory
            if memory not in per_memory:
                per_memory[memory] = [carry(value, replica.device) for value in opening]
            replica.opening = per_memory[memory]

    def refuse_written_by_shards(self) -> None:
        """Refuse parameters that shards have written since `open_step`.

        Raises:
            ContractError: names them.
        """
        now = [*map(_VERSION, self._distinct)]
        if now != self._opened:
            names = [name for name, _ in self.home.module.named_parameters()] * len(self._owners)
            pairs = zip(names, now, self._opened, strict=True)
            written = dict.fromkeys(name for name, late, early in pairs if late != early)
            raise written_error([*written])

    def close_step(self, closing: Sequence[torch.Tensor | None]) -> None:
        """Write the buffers' closing values into the user's module (None: the opening value)."""
        if self.home.buffers:
            pairs = zip(self.home.opening, closing, strict=True)
            values = [opening if value is None else value for opening, value in pairs]
            with torch.no_grad():
                torch._foreach_copy_(self.home.buffers, values)

    def restore_opening(self) -> None:
        """Reset the buffers of the user's module to the step's opening values."""
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
        replica = Replica(device, module, copied=self._model, rules=self._rules)
        self._owners.setdefault(device.memory, replica)
        self.all.append(replica)

    def _home_versions(self) -> list[tuple[int, int]]:
        buffers = () if self._home_computes else self.home.buffers
        return [(one._version, one.data_ptr()) for one in (*self.home.parameters, *buffers)]


def _structure(
    modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]
) -> tuple[list[Any], list[Any]]:
    """Return a value that changes when the model's layers, parameters, buffers or hooks do."""
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
    """Refuse a model or an optimizer that can't be trained.

    Raises:
        ContractError: a layer was compiled by the user.
        ModelError: the model has lazy parameters or hooks on accumulated gradients, or the
            optimizer holds parameters that are not the model's.
    """
    _refuse_hooks_on_sums(model)
    _refuse_compiled(model)
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


def _refuse_compiled(model: nn.Module) -> None:
    """Refuse layers that the user has compiled.

    How their code rounds depends on which shapes were seen first, and on what else was compiled at
    the same time (measured with ResNet and Inductor: two trainings on one device differ).
    """
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None or hasattr(module, "_torchdynamo_orig_callable"):
            raise ContractError(
                f"{f'the layer {name}' if name else 'the model'} was compiled by torch.compile, so "
                f"its rounding depends on which shards were computed first: give the module as it "
                f"was before, and Trainer(compile=True), which compiles every size of shard once"
            )


def move_home(model: nn.Module, optimizer: torch.optim.Optimizer, device: Device) -> None:
    """Move the user's model and the optimizer's state to `device`, in place."""
    target = device.torch_device
    if any(parameter.device != target for parameter in model.parameters()):
        model.to(target)
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim > 0:
                    state[key] = value.to(target)


def _copy_parameter(parameter: nn.Parameter, device: Device, *, share: bool) -> nn.Parameter:
    data = parameter.detach() if share else carry(parameter, device)
    replica = nn.Parameter(data, requires_grad=parameter.requires_grad)
    replica.__dict__.update(parameter.__dict__)
    return replica


def _copy_module(module: nn.Module, parameters: dict[int, nn.Parameter]) -> nn.Module:
    try:
        return copy.deepcopy(module, {**_kept_results(module), **parameters})
    except Exception as error:
        raise ModelError(
            f"the model {type(module).__name__} can't be copied for a second device: "
            f"copy.deepcopy(model) fails with {type(error).__name__}: {error}. Keep locks, files "
            f"and computed tensors out of its attributes (or give it __deepcopy__), or train on "
            f"one device"
        ) from error


def _kept_results(module: nn.Module) -> dict[int, torch.Tensor]:
    """Return the results of a forward pass that layers keep in attributes, detached, by their `id`.

    `copy.deepcopy` refuses tensors that have a graph.
    """
    attributes: Any = [vars(child) for child in module.modules()]
    leaves: list[Any] = optree.tree_leaves(attributes)
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    return {id(one): one.detach().clone() for one in tensors if one.grad_fn is not None}


def _refuse_hooks_on_sums(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise ContractError(
                f"the parameter {name} has a hook on its accumulated gradient, which would see "
                f"sums of some shards: work on the mean gradient in before_update=..., or use "
                f"register_hook, whose hooks get the mean gradient"
            )


def written_error(names: list[str]) -> ContractError:
    """Return the error for parameters that were written while shards were computed."""
    many = len(names) > 1
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return ContractError(
        f"the parameter{'s' * many} {shown} {'were' if many else 'was'} written in forward or in "
        f"the objective, which every shard calls, several at the same time: write parameters (a "
        f"momentum encoder, an average of the weights) once for each step, in "
        f"Trainer(after_update=...)"
    )
