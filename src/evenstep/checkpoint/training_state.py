"""The training state as one tree of plain values and tensors, taken and put back exactly."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evenstep.errors import CheckpointError
from evenstep.experiment import Experiment, with_current_names

Tree = dict[str, Any]


def model_state(model: nn.Module) -> Tree:
    """Return the model's parameters and buffers by name, each once (buffers: all of them)."""
    return {
        "parameters": {name: value.detach() for name, value in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
    }


def restore_model(model: nn.Module, saved: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Write saved parameters and buffers into `model`, in place.

    Raises:
        CheckpointError: names, shapes or dtypes differ (the tensors are named); nothing is written.
    """
    present = model_state(model)
    differences = [
        line for part in present for line in _differences(present[part], saved[part], part[:-1])
    ]
    if differences:
        shown = "; ".join(differences[:3])
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise CheckpointError(
            f"the checkpoint is of another model: {shown}{more}: "
            f"build the model that was trained, or train from the start in a new folder"
        )
    with torch.no_grad():
        for part, tensors in present.items():
            for name, tensor in tensors.items():
                tensor.copy_(saved[part][name])


def restore_optimizer(optimizer: torch.optim.Optimizer, saved: Tree) -> None:
    """Put back an optimizer's state with the dtypes and memory layouts it was saved with.

    `load_state_dict` casts state to its parameter's dtype; what that changed is put right.
    """
    try:
        optimizer.load_state_dict(saved)
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"the checkpoint is of another optimizer than {type(optimizer).__name__} with "
            f"{len(optimizer.param_groups)} parameter groups: {error}"
        ) from error
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, value in saved["state"].get(number, {}).items():
            loaded = optimizer.state[parameter].get(key)
            if not isinstance(value, torch.Tensor) or not isinstance(loaded, torch.Tensor):
                continue
            if loaded.dtype != value.dtype or loaded.stride() != value.stride():
                optimizer.state[parameter][key] = value.to(loaded.device, copy=True)


@contextmanager
def rolled_back_on_error(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put parameters and optimizer state back if the block fails (it may fail half-way)."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    saved = copy.deepcopy(optimizer.state_dict())
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.copy_(value)
        restore_optimizer(optimizer, saved)
        raise


def check_experiment(experiment: Experiment, saved: Mapping[str, Any]) -> None:
    """Refuse to go on with an experiment other than the checkpoint's, naming what differs."""
    now = dataclasses.asdict(experiment)
    saved = {**dataclasses.asdict(Experiment()), **with_current_names(saved)}
    differing = [name for name in now if now[name] != saved.get(name)]
    if differing:
        got = ", ".join(f"{name} {now[name]} instead of {saved.get(name)}" for name in differing)
        raise CheckpointError(
            f"can't resume with {got}: shards, seed, precision, memory format, threads, "
            f"compile and batch_norm are part of the experiment; resume with those of the "
            f"checkpoint (devices may differ)"
        )


def check_is_training_state(saved: object, folder: Path) -> None:
    """Refuse a checkpoint that holds something else than a trainer's state."""
    parts = {"experiment", "cursor", "steps_done", "draws_random", "model", "optimizer"}
    if not isinstance(saved, dict) or not parts <= saved.keys():
        raise CheckpointError(
            f"{folder} holds a checkpoint, but not of a trainer: give a folder that Trainer.save "
            f"or evenstep train --checkpoint-dir has written"
        )


def restore_scheduler(
    scheduler: torch.optim.lr_scheduler.LRScheduler | None, saved: Tree | None
) -> None:
    """Put back a scheduler's state; a checkpoint with one needs one, and the other way round."""
    if (scheduler is None) != (saved is None):
        raise CheckpointError(
            "the checkpoint was saved "
            + ("with" if saved else "without")
            + " a learning-rate scheduler: give Trainer.load "
            + ("scheduler=..." if saved else "none")
        )
    if scheduler is not None and saved is not None:
        scheduler.load_state_dict(saved)


def check_fingerprint(now: str, saved: str) -> None:
    """Make sure that what was restored is what was saved, bit for bit."""
    if now != saved:
        raise CheckpointError(
            f"the restored state has fingerprint {now[:16]}…, the saved one had {saved[:16]}…: the "
            f"optimizer or the model kept something back; it can't be resumed exactly"
        )


def _differences(
    present: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], kind: str
) -> list[str]:
    missing = [f"{kind} {name} is not in it" for name in present if name not in saved]
    unknown = [f"its {kind} {name} is not in the model" for name in saved if name not in present]
    other = [
        f"{kind} {name} is {_spell(saved[name])} in it, {_spell(tensor)} in the model"
        for name, tensor in present.items()
        if name in saved and _spell(saved[name]) != _spell(tensor)
    ]
    return missing + unknown + other


def _spell(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
