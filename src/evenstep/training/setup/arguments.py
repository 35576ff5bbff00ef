"""The arguments of a trainer, checked before anything is changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict, cast

import torch
from torch import nn

from evenstep.callbacks import Callback
from evenstep.checkpoint.user_state import Stateful
from evenstep.devices import Device, Devices
from evenstep.errors import InputError, ModelError, shown
from evenstep.limits import MOST_IN_FLIGHT, Precision
from evenstep.options import Experiment, Faults, Layout
from evenstep.options.checks import check_flag, check_integer
from evenstep.replicas import inner_optimizers
from evenstep.shard.loss import UserObjective
from evenstep.steps.update import Hook

_REFINES = ("shards", "seed", "precision")  # keywords that are fields of an experiment too


class TrainerOptions(TypedDict, total=False):
    """The keyword arguments of `Trainer` that `Trainer.load` takes too."""

    objective: UserObjective | None
    devices: Devices
    shards: int | None
    seed: int | None
    precision: Precision | None
    experiment: Experiment | None
    layout: Layout | None
    faults: Faults | None
    before_update: Hook | None
    after_update: Hook | None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    state: Mapping[str, Stateful] | None
    callbacks: Sequence[Callback]
    max_in_flight: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """What a training was given besides model, optimizer and loss.

    Attributes:
        experiment: the choices that the result depends on.
        devices: the devices of this process.
        layout: how the work is divided among them.
        faults: limits and checks.
        max_in_flight: the number of steps that may be unfinished at once.

    Raises:
        InputError: the number of steps is out of range.
    """

    experiment: Experiment
    devices: Sequence[Device]
    layout: Layout
    faults: Faults
    max_in_flight: int

    def __post_init__(self) -> None:
        check_integer("max_in_flight", self.max_in_flight, at_least=1, at_most=MOST_IN_FLIGHT)

    @property
    def overlaps(self) -> bool:
        """Whether steps may be in flight while the user's thread goes on."""
        return self.max_in_flight > 1

    @property
    def is_lockstep(self) -> bool:
        """Whether all shards of a step are computed at the same time."""
        return self.layout.side_by_side or self.experiment.batch_norm == "sync"


def check_options(
    experiment: Experiment | None, layout: Layout | None, faults: Faults | None
) -> tuple[Experiment, Layout, Faults]:
    """Return the groups of options, with defaults for those that were left out.

    Raises:
        InputError: one of them is something else.
    """
    given = {"experiment": experiment, "layout": layout, "faults": faults}
    kinds = {"experiment": Experiment, "layout": Layout, "faults": Faults}
    for name, value in given.items():
        if value is not None and not isinstance(value, kinds[name]):
            raise InputError(
                f"got {name}={shown(value)}: give an evenstep.{kinds[name].__name__}(...)"
            )
    return experiment or Experiment(), layout or Layout(), faults or Faults()


def refined(experiment: Experiment, **keywords: object) -> Experiment:
    """Return an experiment with the choices that were also given as keywords; None for none.

    Raises:
        InputError: both give a choice, and not the same.
    """
    own = {name: getattr(experiment, name) for name in experiment.given}
    more = {name: value for name, value in keywords.items() if value is not None}
    for name in own.keys() & more.keys():
        if own[name] != more[name]:
            raise InputError(
                f"got {name}={shown(more[name])} and experiment=Experiment({name}="
                f"{shown(own[name])}): give {name} in one place only"
            )
    return Experiment(**{**own, **more}) if more else experiment


def check_flags(**flags: object) -> None:
    """Refuse arguments that are neither True nor False."""
    for name, value in flags.items():
        check_flag(name, value)


def check_functions(**functions: Callable[..., object] | None) -> None:
    """Refuse arguments that are neither functions nor None."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise InputError(f"got {name}={shown(value)}: give a function of the module")


def check_scheduler(scheduler: object, optimizer: torch.optim.Optimizer) -> None:
    """Refuse what is not a scheduler, has no state, or schedules a different optimizer."""
    if isinstance(scheduler, torch.optim.Optimizer):
        raise InputError(
            f"got an optimizer, {type(scheduler).__name__}, as scheduler: give a scheduler that "
            f"was made for it, or leave scheduler out"
        )
    if scheduler is not None and (
        isinstance(scheduler, type) or not hasattr(scheduler, "state_dict")
    ):
        raise InputError(f"got scheduler={shown(scheduler)}: give one of torch's schedulers")
    scheduled = getattr(scheduler, "optimizer", None)
    if isinstance(scheduled, torch.optim.Optimizer) and not _share_groups(scheduled, optimizer):
        kind = type(scheduler).__name__
        raise InputError(
            f"the scheduler, {kind}, belongs to a different optimizer, {type(scheduled).__name__}, "
            f"so it would not change the learning rates of the trainer's: write {kind}(optimizer, "
            f"...) with the trainer's optimizer, or give a scheduler of an optimizer that you step "
            f'yourself as state={{"scheduler": ...}}'
        )


def _share_groups(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Return whether one optimizer is the other, holds it, or has a group of it."""
    places: list[set[int]] = []
    for optimizer in (one, other):
        held = [optimizer, *inner_optimizers(optimizer, own_state=False).values()]
        groups = [group for each in held for group in each.param_groups]
        places.append({*map(id, held), *map(id, groups)})
    return bool(places[0] & places[1])


def check_kinds(model: object, optimizer: object) -> None:
    """Refuse a model that is no module, and an optimizer that is none of torch's.

    Raises:
        ModelError: it is of a different class, or a class itself.
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


def resumed(options: TrainerOptions, saved: Experiment) -> TrainerOptions:
    """Return options with the saved experiment, in which what they choose replaces what was saved.

    A choice that differs from the saved one stays, to be refused by name.
    """
    keywords = {name: options.get(name) for name in _REFINES}
    asked = refined(check_options(options.get("experiment"), None, None)[0], **keywords)
    choices = {name: getattr(asked, name) for name in asked.given}
    rest = {name: value for name, value in options.items() if name not in _REFINES}
    return cast(TrainerOptions, {**rest, "experiment": dataclasses.replace(saved, **choices)})
