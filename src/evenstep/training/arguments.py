"""The arguments of a trainer, checked before anything is changed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

import torch
from torch import nn

from evenstep.callbacks import Callback
from evenstep.checkpoint.user_state import Stateful
from evenstep.devices import Device, Devices
from evenstep.distributed import job_share
from evenstep.engine import Lanes
from evenstep.errors import InputError, ModelError, shown
from evenstep.experiment import Experiment, check_choice, check_flag, check_integer, check_seconds
from evenstep.limits import (
    MOST_IN_FLIGHT,
    MOST_SECONDS,
    BatchNorm,
    BufferRule,
    MemoryFormat,
    PartitionOf,
    Precision,
    Split,
)
from evenstep.nn import sliced_layers
from evenstep.shard.loss import UserObjective
from evenstep.stages.plan import StageNames, Stages, find_stages
from evenstep.steps.executors import lockstep_option
from evenstep.steps.update import Hook

_MOST_SIDE_BY_SIDE = 1_024  # shards, each with a thread and a replica


class TrainerOptions(TypedDict, total=False):
    """The keyword arguments of `Trainer` that `Trainer.load` takes too."""

    objective: UserObjective | None
    devices: Devices
    experiment: Experiment | None
    shards: int
    seed: int
    precision: Precision
    memory_format: MemoryFormat
    threads: int
    compile: bool
    batch_norm: BatchNorm
    separable: bool
    buffers: dict[str, BufferRule]
    batch_dim: int
    clip_norm: float | None
    side_by_side: bool
    split: Split
    stages: StageNames | None
    before_update: Hook | None
    after_update: Hook | None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    state: Mapping[str, Stateful] | None
    callbacks: Sequence[Callback]
    partition: PartitionOf | None
    max_in_flight: int
    lost_after_s: float
    peer_timeout_s: float
    allow_rounding: bool
    check: str
    check_every: int
    tune_malloc: bool
    lanes: Callable[[Sequence[Device]], Lanes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The arguments of `Trainer` that the result does not depend on, besides the devices.

    Raises:
        InputError: a number of steps or of seconds is none, or out of range; a flag is none.
    """

    side_by_side: bool
    split: Split
    max_in_flight: int
    lost_after_s: float
    peer_timeout_s: float
    allow_rounding: bool
    check_every: int
    tune_malloc: bool
    lanes: Callable[[Sequence[Device]], Lanes]
    partition: PartitionOf | None = None

    def __post_init__(self) -> None:
        if self.partition not in (None, "optimizer"):
            raise InputError(f"got partition={shown(self.partition)}: give 'optimizer', or None")
        check_integer("max_in_flight", self.max_in_flight, at_least=1, at_most=MOST_IN_FLIGHT)
        check_integer("check_every", self.check_every, at_least=1, at_most=None)
        check_seconds("peer_timeout_s", self.peer_timeout_s, at_most=MOST_SECONDS)
        check_seconds("lost_after_s", self.lost_after_s, at_most=math.inf)
        check_flags(
            side_by_side=self.side_by_side,
            tune_malloc=self.tune_malloc,
            allow_rounding=self.allow_rounding,
        )
        check_choice("split", self.split, ("shards", "slices"))

    @property
    def overlaps(self) -> bool:
        """Whether steps may be in flight while the user's thread goes on."""
        return self.max_in_flight > 1


def check_flags(**flags: object) -> None:
    """Refuse arguments that are neither True nor False."""
    for name, value in flags.items():
        check_flag(name, value)


def check_functions(**functions: Callable[..., object] | None) -> None:
    """Refuse arguments that are neither functions nor None."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise InputError(f"got {name}={shown(value)}: give a function of the module")


def check_parts(scheduler: object, lanes: object) -> None:
    """Refuse a scheduler without a state, and lanes that can't be made."""
    if not callable(lanes):
        raise InputError(f"got lanes={shown(lanes)}: give a class such as ThreadLanes")
    if isinstance(scheduler, torch.optim.Optimizer):
        raise InputError(
            f"got an optimizer, {type(scheduler).__name__}, as scheduler: give a scheduler that "
            f"was made for it, or leave scheduler out"
        )
    if scheduler is not None and (
        isinstance(scheduler, type) or not hasattr(scheduler, "state_dict")
    ):
        raise InputError(f"got scheduler={shown(scheduler)}: give one of torch's schedulers")


def check_kinds(model: object, optimizer: object) -> None:
    """Refuse a model that is no module, and an optimizer that is none of torch's.

    Raises:
        ModelError: it is of another class, or a class itself.
    """
    if isinstance(model, type):
        name = model.__name__
        raise ModelError(
            f"got the class {name} as model: give an object of it, such as {name}(...)"
        )
    if not isinstance(model, nn.Module):
        raise ModelError(f"got model={shown(model)}: give a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ModelError(f"got {_no_optimizer(optimizer)}")


def _no_optimizer(given: object) -> str:
    """Return what was given as optimizer, and what is needed."""
    kind = type(given).__name__
    if isinstance(given, torch.optim.lr_scheduler.LRScheduler):
        return (
            f"a scheduler, {kind}, as optimizer: give the optimizer that it was made for, and the "
            f"scheduler as evenstep.Trainer(..., scheduler=...)"
        )
    if isinstance(given, nn.Module):
        return (
            f"a loss, {kind}, as optimizer: the order is evenstep.Trainer(model, optimizer, loss)"
        )
    found = (
        f"the class {given.__name__} as optimizer"
        if isinstance(given, type)
        else f"optimizer={shown(given)}"
    )
    return f"{found}: give an optimizer object, such as torch.optim.SGD(model.parameters(), lr=0.1)"


def only_one(given: Experiment | None, keywords: Experiment) -> Experiment:
    """Return the experiment that was given as one value, or else by keywords; not by both."""
    if given is None:
        return keywords
    if not isinstance(given, Experiment):
        raise InputError(f"got experiment={shown(given)}: give an evenstep.Experiment")
    default = Experiment()
    twice = [
        field.name
        for field in dataclasses.fields(Experiment)
        if getattr(keywords, field.name) != getattr(default, field.name)
    ]
    if twice:
        raise InputError(
            f"got experiment= and {', '.join(twice)}: give these choices in one place only"
        )
    return given


def shards_at_once(experiment: Experiment, devices: Sequence[Device]) -> int:
    """Return how many shards of a step each device computes at the same time in lockstep."""
    if any(device.kind != "cpu" for device in devices):
        raise InputError(
            f"got {lockstep_option(experiment)} and {devices[0]}, but only CPU devices can wait "
            f"for each other's shards: name CPU devices, or leave it out"
        )
    if experiment.shards > _MOST_SIDE_BY_SIDE:
        raise InputError(
            f"got {lockstep_option(experiment)} and shards={experiment.shards}, but at most "
            f"{_MOST_SIDE_BY_SIDE} shards can run side by side: each has a thread and a copy of "
            f"the model's layers"
        )
    return -(-experiment.shards // len(devices))


def refuse_unfit_slices(
    model: nn.Module, experiment: Experiment, layout: Layout, devices: Sequence[Device]
) -> None:
    """Refuse to compute slices on several devices where that is not possible."""
    if layout.split != "slices":
        return
    if not sliced_layers(model):
        raise InputError(
            "got split='slices', but no layer of the model has slices: call "
            "evenstep.nn.slice_(model, slices=2) first"
        )
    others = {
        "compile=True": experiment.compile,
        "batch_norm='sync'": experiment.batch_norm == "sync",
        "side_by_side=True": layout.side_by_side,
        f"max_in_flight={layout.max_in_flight}": layout.overlaps,
    }
    for other, is_given in others.items():
        if is_given:
            raise InputError(
                f"got split='slices' and {other}, which don't work together: use one of them only"
            )
    for device in devices:
        if (device.kind, device.threads) != ("cpu", experiment.threads):
            raise InputError(
                f"got split='slices' and {device}: only CPU devices with the trainer's number of "
                f"threads can compute slices together; use split='shards', whose results are the "
                f"same"
            )


def refuse_compiled_lockstep(experiment: Experiment, *, side_by_side: bool) -> None:
    """Refuse to compile shards that wait for each other."""
    if side_by_side and experiment.compile:
        raise InputError(
            "got compile=True and side_by_side=True, but shards that wait for each other can't "
            "be compiled: use one of them only"
        )


def refuse_lockstep_in_processes(experiment: Experiment, *, side_by_side: bool) -> None:
    """Refuse shards that wait for each other in one of several processes, before they meet."""
    if side_by_side or experiment.batch_norm == "sync":
        refuse_lockstep_apart(experiment, (), is_alone=job_share()[1] == 1, has_threads=True)


def chosen_stages(
    given: StageNames | None,
    model: nn.Module,
    devices: Sequence[Device],
    experiment: Experiment,
    *,
    side_by_side: bool,
    split: Split,
) -> Stages | None:
    """Return the stages of the network; None without any, or with a single one.

    Raises:
        InputError: they can't be used with these devices, or with another option.
        ModelError: they don't fit the model.
    """
    if given is None:
        return None
    stages = find_stages(given, model, devices)
    others = {
        lockstep_option(experiment): side_by_side or experiment.batch_norm == "sync",
        "compile=True": experiment.compile,
    }
    if split == "slices":
        raise InputError(
            "got stages and split='slices', but devices either have a stage each, or compute "
            "slices together: use one of them only"
        )
    for option, is_given in others.items():
        if is_given:
            raise InputError(
                f"got stages and {option}, but shards that pass from device to device can't be "
                f"{'compiled' if experiment.compile else 'all under way at once'}: use one of them "
                f"only"
            )
    return stages if stages.count > 1 else None


def refuse_lockstep_apart(
    experiment: Experiment, devices: Sequence[Device], *, is_alone: bool, has_threads: bool
) -> None:
    """Refuse to compute shards side by side where they can't wait for each other.

    Args:
        experiment: the choices that the result depends on.
        devices: the devices of this process.
        is_alone: whether there are no other processes.
        has_threads: whether each device has a thread.
    """
    option = lockstep_option(experiment)
    if not is_alone:
        raise InputError(
            f"got {option} in one of several processes, which don't wait for each other's "
            f"shards: start one process, which uses all devices of this machine, or leave it out"
        )
    if len(devices) > 1 and not has_threads:
        raise InputError(
            f"with {option} the {len(devices)} devices wait for each other, "
            f"which lanes without threads can't: use one device, or ThreadLanes"
        )
