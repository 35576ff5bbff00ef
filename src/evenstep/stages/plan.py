"""The stages of a network: which of its modules, and so which parameters, lie on which device.

A stage is computed by one device of several that compute a shard in turn (a pipeline: GPipe, Huang
et al., 2019, arXiv:1811.06965). Stages are named by the modules that begin them. Where a module
lies is a layout: it has no effect on the result.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence

from torch import nn

from evenstep.devices import Device
from evenstep.errors import InputError, ModelError, counted, shown
from evenstep.options.layout import StageNames
from evenstep.stages.balance import balanced_stages, parts_of


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """The stages of one model.

    Attributes:
        count: S, the number of stages.
        first: the stage that each named module begins.
        of_module: the stage of every module from the first named one on, by its name. A module that
            is registered under several names has the first.
        of_parameter: the stage of every parameter, in the order of `model.parameters()`.
        await_times: whether they are of equal bytes only until times are measured.
    """

    count: int
    first: Mapping[str, int]
    of_module: Mapping[str, int]
    of_parameter: Sequence[int]
    await_times: bool = False

    def parameters_of(self, model: nn.Module) -> list[list[nn.Parameter]]:
        """Return the parameters of each stage."""
        pairs = [*zip(self.of_parameter, model.parameters(), strict=True)]
        return [[one for of, one in pairs if of == stage] for stage in range(self.count)]

    def has_whole(self, name: str, module: nn.Module) -> bool:
        """Return whether all parameters of a module, of which it has some, are in one stage."""
        path = f"{name}." if name else ""
        lies_in = {
            self.of_module.get(path + below if below else name)
            for below, one in module.named_modules()
            if [*one.parameters(recurse=False)]
        }
        return lies_in == {self.of_module.get(name)}

    def of_modules(self, model: nn.Module) -> list[int]:
        """Return the stage of each of a model's modules, in their order; 0 before the first."""
        of_module = self.again(model).of_module
        return [of_module.get(name, 0) for name, _ in model.named_modules()]

    def again(self, model: nn.Module) -> StagePlan:
        """Return the stages with the same names of a model whose layers were changed.

        Raises:
            ModelError: a named module is no longer there, or a new parameter lies in no stage.
        """
        again = stages_of(model, self.first, self.count)
        return dataclasses.replace(again, await_times=self.await_times)


def find_stages(given: StageNames, model: nn.Module, devices: Sequence[Device]) -> StagePlan:
    """Return the stages that `given` describes, after checking them.

    A named module begins a run: it and what follows it in the order of `model.named_modules()`
    belong to its stage, until the next named one.

    Args:
        given: the stage of each module that begins a run, by the module's name. Or "balanced" for
            one stage on each device, or "balanced:2" for two stages, of equal numbers of bytes;
            "balanced:time" and "balanced:2:time" for equal times, which are not measured here.
        model: the model.
        devices: the devices; stage s is on the devices s, S + s, 2 S + s and so on.

    Raises:
        InputError: the numbers of the stages have gaps, or don't fit the devices.
        ModelError: a module doesn't exist, or a parameter lies in no stage.
    """
    if isinstance(given, str):
        count, by_time = _balanced_count(given, len(devices))
        _check_devices(count, devices)
        if by_time and devices[0].is_accelerator:
            raise InputError(
                f"got Stages({given!r}) and {devices[0]}, but the times of a network's parts are "
                f'measured on CPUs: use "balanced", or name the modules that begin a stage'
            )
        stages = stages_of(model, balanced_stages(parts_of(model), count), count)
        return dataclasses.replace(stages, await_times=by_time and count > 1)
    count = _checked_count(given)
    _check_devices(count, devices)
    return stages_of(model, dict(given), count)


def _balanced_count(given: str, devices: int) -> tuple[int, bool]:
    """Return the number of balanced stages, and whether they are balanced by time."""
    match = re.fullmatch(r"balanced(?::([1-9]\d{0,3}))?(:time)?", given)
    if match is None:
        raise InputError(
            f'got Stages({shown(given)}): give "balanced", "balanced:2" for two stages, '
            f'"balanced:time" or "balanced:2:time" for equal times instead of bytes, or the '
            f'stage of each module that begins one, such as {{"features": 0, "classifier": 1}}'
        )
    return devices if match[1] is None else int(match[1]), match[2] is not None


def _checked_count(given: Mapping[str, int]) -> int:
    """Return the number of stages; refuse numbers that are not 0, 1, 2, ..."""
    if not isinstance(given, Mapping) or not given:
        raise InputError(
            f"got Stages({shown(given)}): give the stage of each module that begins one, such as "
            f'{{"features": 0, "classifier": 1}}, or "balanced"'
        )
    for name, stage in given.items():
        if not isinstance(name, str):
            raise InputError(f"got the module {shown(name)} in Stages: give its name")
        if not isinstance(stage, int) or isinstance(stage, bool) or stage < 0:
            raise InputError(f"got stage {shown(stage)} for {name!r}: give an integer from 0 on")
    numbers = sorted({*given.values()})
    if numbers != [*range(len(numbers))]:
        missing = next(number for number, has in enumerate(numbers) if number != has)
        raise InputError(
            f"Stages has the numbers {', '.join(map(str, numbers))}, and {missing} is missing: "
            f"number the stages 0, 1, 2, ... without gaps"
        )
    return len(numbers)


def _check_devices(count: int, devices: Sequence[Device]) -> None:
    """Refuse stages that the devices can't be divided among, or can't compute in turn."""
    if len(devices) % count:
        fits = max(count, len(devices) - len(devices) % count)
        raise InputError(
            f"got {count} stages for {counted(len(devices), 'device')}: every stage "
            f"needs as many devices as the others, so use {fits} devices, or other stages"
        )
    if len({(device.own_memory, device.threads) for device in devices}) > 1:
        raise InputError(
            f"got Stages(...) and {', '.join(map(str, devices))}: give devices with one number of "
            f"threads that all share memory, or that all have memory of their own"
        )
    if len({device.kind for device in devices}) > 1:
        raise InputError(
            f"got Stages(...) and {', '.join(map(str, devices))}: give devices of one kind"
        )


def stages_of(model: nn.Module, first: Mapping[str, int], count: int) -> StagePlan:
    """Return the stage of every module and parameter of a model.

    Args:
        model: the model.
        first: the stage that each named module begins.
        count: S, the number of stages.

    Raises:
        ModelError: a named module doesn't exist, or a parameter lies in no stage.
    """
    modules = dict(model.named_modules())
    for name in first:
        if name not in modules:
            raise ModelError(_no_module(name, modules))
    of_module: dict[str, int] = {}
    of_parameter: dict[nn.Parameter, int] = {}
    stage: int | None = None
    for name, module in modules.items():
        stage = first.get(name, stage)
        if stage is not None:
            of_module[name] = stage
        for key, parameter in module.named_parameters(recurse=False):
            if stage is None:
                raise ModelError(_outside(name, key, first))
            of_parameter.setdefault(parameter, stage)
    return StagePlan(
        count, dict(first), of_module, [of_parameter[one] for one in model.parameters()]
    )


def _no_module(name: str, modules: Mapping[str, nn.Module]) -> str:
    close, there = difflib.get_close_matches(name, modules, 1), [*filter(None, modules)]
    some = ", ".join(map(repr, there[:5])) + ", ..." * (len(there) > 5)
    meant = f"did you mean {close[0]!r}?" if close else f"it has {some or 'none with a name'}"
    return f"Stages names the module {name!r}, which the model does not have: {meant}"


def _outside(module: str, key: str, first: Mapping[str, int]) -> str:
    if not module:
        return (
            f"the parameter {key} belongs to the model itself, so it lies in no stage: move it "
            f"into a module of its own, and name that in Stages"
        )
    return (
        f"the parameter {module}.{key} comes before the first module that Stages names, so it lies "
        f"in no stage: name {module!r} too, such as Stages({{{module!r}: 0, ...}})"
    )
