"""Notes for the user: the devices of a trainer, its memory, and how exact its results are."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn, optim

from evenstep.devices import Device, free_memory_nbytes, layout_notes, rounding_notes
from evenstep.devices.discovery import WITHIN_ROUNDING
from evenstep.options.experiment import Experiment
from evenstep.options.memory import peak_nbytes, sizes_of
from evenstep.private_torch.modules import BatchNorm, Dropout
from evenstep.replicas import is_plain_value
from evenstep.training.setup.arguments import Chosen

logger = logging.getLogger("evenstep")

_KNOWN = ("torch.nn.", "evenstep.nn.")
"""Modules of layers whose settings are compared when training resumes."""

_MODAL = BatchNorm, Dropout
"""Layers that compute something else in evaluation mode."""


class _Earlier(NamedTuple):
    """A trainer of an optimizer: the steps that it has done, and whether it was only loaded."""

    steps_done: int
    is_loaded: bool


_EARLIER = weakref.WeakKeyDictionary[torch.optim.Optimizer, _Earlier]()
"""The last trainer of each optimizer, unless it is open."""


def note_trained(
    optimizer: torch.optim.Optimizer, steps_done: int, *, is_loaded: bool = False
) -> None:
    """Note that a trainer of an optimizer was closed, or only loaded, after some steps."""
    if steps_done:
        _EARLIER[optimizer] = _Earlier(steps_done, is_loaded)


def say_who_trained(optimizer: torch.optim.Optimizer, steps_done: int) -> None:
    """Log that a trainer that opens begins anew with what another one has trained or loaded.

    Args:
        optimizer: the optimizer of both.
        steps_done: how far the one that opens is.
    """
    earlier = _EARLIER.pop(optimizer, None)
    if earlier is None or steps_done:
        return
    if earlier.is_loaded:
        logger.warning(
            "Trainer.load has returned a trainer that continues after step %d, but this one "
            "begins at step 0 with the loaded values: write trainer = evenstep.Trainer.load(...), "
            "and train with that one",
            earlier.steps_done,
        )
    else:
        logger.warning(
            "another trainer has done %d steps with this optimizer, and this one begins again at "
            "epoch 0, with the same order of examples and the same random numbers as that one: "
            "use one trainer for all epochs (`while trainer.cursor.epoch < epochs`), or save, and "
            "go on by Trainer.load",
            earlier.steps_done,
        )


def say_too_little_memory(
    parameters: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    chosen: Chosen,
    *,
    processes: int,
    of_machine: int,
) -> None:
    """Log that a training that opens needs more memory than is free; an estimate (`peak_nbytes`).

    Where devices compute parts of a shard, or shards side by side, nothing is estimated.

    Args:
        parameters: those of the model.
        optimizer: the user's optimizer.
        chosen: what the user has chosen.
        processes: the number of processes that train together.
        of_machine: how many of them this machine has.
    """
    layout, devices = chosen.layout, chosen.devices
    if layout.stages or layout.has_slices or layout.side_by_side:
        return
    sizes, memories = sizes_of(parameters, optimizer), [device.memory for device in devices]
    peaks = peak_nbytes(
        sizes,
        chosen.experiment.shards,
        memories,
        processes=processes,
        owners=layout.has_owners,
        checks=chosen.faults.check_interval is not None,
    )
    needed, more = Counter[torch.device](), Counter[torch.device]()
    for memory, peak in zip(dict.fromkeys(memories), peaks, strict=True):
        place = devices[memories.index(memory)].torch_device
        copies = of_machine if place.type == "cpu" else 1
        held = sizes.parameters + (sizes.held_state if memory == memories[0] else 0)
        needed[place] += copies * peak
        more[place] += copies * (peak - held)
    for place, nbytes in more.items():
        free = free_memory_nbytes(place)
        if free is not None and nbytes > free:
            logger.warning(
                f"the training needs about {_gib(needed[place])} of the memory of {place} at its "
                f"peak for parameters, gradients and the optimizer's state, besides activations; "
                f"that is {_gib(nbytes)} more than now, but {_gib(free)} are free: less is needed "
                f"by fewer devices, by Layout(divide=Owners()) in several processes, or by fewer "
                f"shards (a different experiment)"
            )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3g} GiB"


class Notes:
    """The notes of a trainer.

    Attributes:
        lines: a line for each.
        within_rounding: whether results are equal to those of other devices within rounding, not
            bit for bit.
    """

    def __init__(self, devices: Sequence[Device], experiment: Experiment) -> None:
        self._has_said_mode = False
        self.lines = layout_notes(devices, experiment.shards)
        self.within_rounding = bool(rounding_notes(devices))
        if experiment.shards > 1 and not experiment.separable:
            self.lines.append(
                f"separable=False: the result depends on the number of shards, {experiment.shards}"
            )

    def note_copies(self, names: Sequence[str]) -> None:
        """Note that devices compute on copies of the model, since these tensors lie badly."""
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.lines.append(
                f"not at multiples of 64 bytes: {names[0]}{more} of the model. Something else may "
                f"hold this memory (a flat tensor, a numpy array, a mapped file), so the devices "
                f"compute on copies, which every step updates. To spare them: "
                f"for one in (*model.parameters(), *model.buffers()): one.data = one.data.clone()"
            )

    def say_mode(self, model: nn.Module) -> None:
        """Log once that a model is trained in evaluation mode, if that makes a difference."""
        if self._has_said_mode:
            return
        self._has_said_mode = True
        modal = [one for one in model.modules() if isinstance(one, _MODAL) and not one.training]
        kinds = dict.fromkeys(type(one).__name__ for one in modal)
        if kinds:
            logger.warning(
                "the model is in evaluation mode, which changes what %s compute: call "
                "model.train() before the step",
                " and ".join(kinds),
            )

    def note_rounding(self, reason: str) -> str:
        """Note that results are equal within rounding only; return the line."""
        self.within_rounding = True
        note = f"{reason}: {WITHIN_ROUNDING}"
        if note not in self.lines:
            self.lines.append(note)
        return note


def plain_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the numbers and strings in attributes, by name, that no checkpoint holds.

    They are those of layers and of an optimizer that are the user's own, and have no way to save
    them themselves. The modes of layers are left out.
    """
    found = {}
    for place, layer in model.named_modules():
        kind = type(layer)
        if kind.__module__.startswith(_KNOWN) or _saves(kind, nn.Module, "get_extra_state"):
            continue
        for key, value in vars(layer).items():
            if is_plain_value(value) and key != "training" and not key.startswith("_"):
                found[f"model.{place}.{key}".replace("..", ".")] = repr(value)
    kind = type(optimizer)
    if not (kind.__module__.startswith("torch.") or _saves(kind, optim.Optimizer, "state_dict")):
        for key, value in vars(optimizer).items():
            if is_plain_value(value) and key != "_opt_called":
                found[f"optimizer.{key}"] = repr(value)
    return found


def _saves(kind: type, base: type, method: str) -> bool:
    """Whether a class has its own method by which it says what to save."""
    return getattr(kind, method) is not getattr(base, method)


def say_lost(before: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Log which numbers and strings have changed that no checkpoint holds; return whether any."""
    changed = [name for name, value in now.items() if before.get(name) != value]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        logger.warning(
            "the checkpoint does not hold %s%s, which changed during the training: if results "
            "depend on that, set it after Trainer.load, or keep it in a buffer, in "
            "get_extra_state or in the optimizer's state",
            ", ".join(changed[:3]),
            more,
        )
    return bool(changed)
