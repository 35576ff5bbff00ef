"""The states of the user's own objects, saved and restored with the training state."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from evenstep.checkpoint.codec import encode
from evenstep.checkpoint.restore import (
    Scheduler,
    load_scheduler,
    restore_optimizer,
    scheduler_state,
)
from evenstep.checkpoint.training_state import TrainingState
from evenstep.data.generators import GeneratorStates
from evenstep.data.order import LoaderPlace
from evenstep.errors import CheckpointError, InputError, shown, text_of

logger = logging.getLogger("evenstep")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


class Stateful(Protocol):
    """An object whose state can be saved."""

    def state_dict(self) -> Any:
        """Return the state: tensors and plain values, in any nesting."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take back what `state_dict` returned."""


class UserState:
    """The objects in `Trainer(state=...)`.

    Raises:
        InputError: a name or an object can't be used, or a state can't be saved; in one line.
    """

    def __init__(
        self, objects: Mapping[str, Stateful] | None, saved_already: Mapping[str, object]
    ) -> None:
        if not isinstance(objects, Mapping | None):
            raise InputError(
                f"got state={shown(objects)}: give a dict of names and objects with state_dict and "
                f"load_state_dict"
            )
        self._objects = dict(objects or {})
        reserved = {*saved_already, *(field.name for field in dataclasses.fields(TrainingState))}
        for name, one in self._objects.items():
            _check_name(name, reserved)
            _check_object(name, one, saved_already)
        self._refuse_one_twice()

    @property
    def has_loader(self) -> bool:
        """Whether something that can be iterated is among them."""
        return any(
            hasattr(one, "__iter__") and not isinstance(one, torch.nn.Module)
            for one in self._objects.values()
        )

    @property
    def has_generators(self) -> bool:
        """Whether the states of the default generators are among them."""
        return any(isinstance(one, GeneratorStates) for one in self._objects.values())

    @property
    def has_scheduler(self) -> bool:
        """Whether a learning-rate scheduler is among them, or an attribute of one of them."""
        return any(
            hasattr(held, "optimizer") and callable(getattr(held, "step", None))
            for one in self._objects.values()
            for held in (one, *getattr(one, "__dict__", {}).values())
        )

    def read(self) -> dict[str, Any]:
        """Return the states as they are now, by name."""
        return {name: _state_of(one) for name, one in self._objects.items()}

    def check(self, saved: Collection[str]) -> None:
        """Refuse a checkpoint with states of objects that are not here."""
        missing = [name for name in saved if name not in self._objects]
        if missing:
            names = ", ".join(f'"{name}": ...' for name in missing)
            raise CheckpointError(
                f"the checkpoint has states of objects of your own: give "
                f"Trainer.load(..., state={{{names}}})"
            )

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Give the objects the states that `read` returned.

        Raises:
            CheckpointError: an object does not take it.
        """
        for name, one in self._objects.items():
            if name not in saved:
                logger.warning(
                    'the checkpoint has no state for state["%s"]: the object is not changed', name
                )
                continue
            try:
                _restore(one, saved[name])
            except Exception as error:
                raise CheckpointError(
                    f'the object state["{name}"] of type {type(one).__name__} could not load its '
                    f"saved state ({type(error).__name__}: {text_of(error)}): build it like the "
                    f"one that was saved"
                ) from error

    def _refuse_one_twice(self) -> None:
        names: dict[int, str] = {}
        for name, one in self._objects.items():
            first = names.setdefault(id(one), name)
            if first != name:
                raise InputError(
                    f'state has one object under two names, "{first}" and "{name}": give it once'
                )


def encodable(place: LoaderPlace | None) -> LoaderPlace | None:
    """Return a place in a loader without the loader's own state, if that can't be saved."""
    if place is None or not place.snapshot:
        return place
    try:
        encode(place.snapshot, _nothing_of)
    except CheckpointError as error:
        logger.warning(
            "the %s's own state can't be saved (%s): its batches will be drawn and dropped instead "
            "when training resumes",
            place.loader,
            error,
        )
        return dataclasses.replace(place, snapshot={})
    return place


def _check_name(name: object, reserved: Collection[str]) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(
            f"got the name {shown(name)} in state: use letters, digits, dots, dashes and "
            f"underscores, such as state={{'ema': ema}}"
        )
    if name in reserved:
        raise InputError(
            f'got the name "{name}" in state, which a checkpoint uses itself: choose a different '
            f"one"
        )


def _check_object(name: str, one: Any, saved_already: Mapping[str, object]) -> None:
    what = next((what for what, other in saved_already.items() if other is one), None)
    if what is not None:
        raise InputError(f'state["{name}"] is the trainer\'s {what}, which is saved anyway')
    if not all(callable(getattr(one, each, None)) for each in ("state_dict", "load_state_dict")):
        raise InputError(
            f'state["{name}"] is of type {type(one).__name__}: give an object with state_dict and '
            f"load_state_dict"
        )
    if isinstance(one, DataLoader) and one.num_workers:
        return  # its state_dict would start worker processes
    try:
        encode({name: _state_of(one)}, _nothing_of)
    except CheckpointError as error:
        raise InputError(f'the state_dict of state["{name}"] can\'t be saved: {error}') from error


def _state_of(one: Any) -> Any:
    return scheduler_state(one) if isinstance(one, Scheduler) else one.state_dict()


def _restore(one: Any, state: Any) -> None:
    if isinstance(one, Scheduler):
        load_scheduler(one, state)
    elif isinstance(one, torch.optim.Optimizer):
        restore_optimizer(one, state)  # with the dtypes that it was saved with
    else:
        one.load_state_dict(state)


def _nothing_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=tensor.dtype)
