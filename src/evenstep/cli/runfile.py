"""`run.json` in a folder of checkpoints: the choices of the run, for `--resume`.

A checkpoint holds the state of a trainer, which doesn't know by which names its model and data were
chosen. This file does. It is written whole or not at all, before the first step.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from evenstep.cli.options import Choices
from evenstep.errors import CheckpointError, SaveError
from evenstep.files import write_file

NAME = "run.json"
_FORMAT = "evenstep run"
_EXPERIMENT = ("model", "data", "batch_size", "drop_last", "lr", "momentum")
_KINDS: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "data": (str,),
    "batch_size": (int,),
    "drop_last": (bool,),
    "lr": (float, int),
    "momentum": (float, int),
    "data_dir": (str, type(None)),
    "epochs": (int, type(None)),
    "steps": (int, type(None)),
}


def write_choices(folder: Path, choices: Choices) -> None:
    """Write the choices of a run into its folder of checkpoints, which is made if need be.

    Raises:
        SaveError: it can't be written.
    """
    values = {"format": _FORMAT, **{name: getattr(choices, name) for name in _KINDS}}
    if choices.data_dir is not None:
        values["data_dir"] = os.path.abspath(choices.data_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / NAME, json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise SaveError(
            f"{folder / NAME} could not be written ({error.strerror or error}): give a "
            f"--checkpoint-dir that can be written; nothing was trained"
        ) from error


def saved_choices(folder: Path) -> dict[str, Any]:
    """Return the choices of the run in `folder`, by name: its model, its data and how it trained.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    return _read(folder / NAME)


def resumed_choices(folder: Path, choices: Choices) -> Choices:
    """Return the choices of the run in `folder`, with the length that `choices` asks for.

    The model, the data, the batch size and the optimizer's numbers are the run's own. So are the
    folder of the data and the length, where `choices` left them open.

    Raises:
        CheckpointError: what stood on the command line is another experiment, or the file is
            missing or damaged.
    """
    saved = _read(folder / NAME)
    differing = [
        f"--{name.replace('_', '-')} {getattr(choices, name)} instead of {saved[name]}"
        for name in _EXPERIMENT
        if name in choices.given and getattr(choices, name) != saved[name]
    ]
    if differing:
        raise CheckpointError(
            f"can't resume {folder} with {', '.join(differing)}: they are part of the experiment; "
            f"leave them out, or start another run in a folder of its own"
        )
    asked = {"data_dir"} & choices.given
    if choices.given & {"epochs", "steps"}:
        asked = asked | {"epochs", "steps"}
    return dataclasses.replace(
        choices, **{name: value for name, value in saved.items() if name not in asked}
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="ascii"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: evenstep train writes it beside its checkpoints; those that "
            f"Trainer.save wrote are resumed with Trainer.load"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{path} can't be read ({error.strerror}): make it readable"
        ) from None
    except ValueError:
        values = None
    if not _is_ours(values):
        raise CheckpointError(
            f"{path} is damaged or not evenstep's: put it back from a backup, or resume with "
            f"Trainer.load"
        )
    return {name: values[name] for name in _KINDS}


def _is_ours(values: Any) -> bool:
    return (
        isinstance(values, dict)
        and values.get("format") == _FORMAT
        and all(name in values and type(values[name]) in kinds for name, kinds in _KINDS.items())
    )
