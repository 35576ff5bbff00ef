"""Reads and writes `run.json`, which keeps a training's options beside its checkpoints.

A checkpoint holds the state of a trainer, but not the names of the model and the data. `--resume`
and `evenstep export` find them here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenstep.cli.options.table import Scope
from evenstep.cli.options.training import ExperimentOptions
from evenstep.errors import CheckpointError, SaveError
from evenstep.files import read_file, write_file

NAME = "run.json"
_FORMAT = "evenstep run"
_DIGEST = "sha256"  # of everything else; files of version 0.1.0 have none
_MOST_NBYTES = 1 << 20
_COMPARED, _REPLACEABLE = (
    {option.name: option for option in ExperimentOptions.options() if option.scope is scope}
    for scope in (Scope.RUN_FILE, Scope.REPLACEABLE)
)
_KEPT = {**_COMPARED, **_REPLACEABLE}


def write_run_file(folder: Path, options: ExperimentOptions) -> None:
    """Write the options of a training into its folder of checkpoints, creating the folder.

    The file is written completely or not at all.

    Raises:
        SaveError: it can't be written.
    """
    values = {"format": _FORMAT, **{name: getattr(options, name) for name in _KEPT}}
    if options.data_dir is not None:
        values["data_dir"] = os.path.abspath(options.data_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        values[_DIGEST] = _digest(values)
        write_file(folder / NAME, json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise SaveError(
            f"{folder / NAME} could not be written ({error.strerror or error}), and nothing was "
            f"trained: choose a writable --checkpoint-dir"
        ) from error


def read_run_file(folder: Path) -> dict[str, Any]:
    """Return the saved options of the training in `folder`, by name.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    path = folder / NAME
    try:
        values = json.loads(read_file(path, at_most=_MOST_NBYTES))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: evenstep train writes it beside its checkpoints; to resume "
            f"checkpoints that Trainer.save wrote, use Trainer.load"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{path} can't be read ({error.strerror}): make it readable"
        ) from None
    except (ValueError, RecursionError):
        values = None
    if not _is_valid(values) or values.get(_DIGEST, _digest(values)) != _digest(values):
        raise CheckpointError(
            f"{path} is damaged or was not written by evenstep: restore it from a backup, or "
            f"resume with Trainer.load"
        )
    return {name: values[name] for name in _KEPT}


def resumed_options(folder: Path, options: ExperimentOptions) -> ExperimentOptions:
    """Return the options with which the training in `folder` resumes.

    They are those of its run file; the folder of the data and the length may be replaced by
    options on the command line.

    Raises:
        CheckpointError: the command line asks for a different experiment, or the file is missing or
            damaged.
    """
    saved = read_run_file(folder)
    differing = [
        f"{option.flag} {getattr(options, name)} instead of {saved[name]}"
        for name, option in _COMPARED.items()
        if name in options.given and getattr(options, name) != saved[name]
    ]
    if differing:
        raise CheckpointError(
            f"can't resume {folder} with {', '.join(differing)}, because these belong to the "
            f"experiment: leave them out, or train in a different --checkpoint-dir"
        )
    replaced = options.given & _REPLACEABLE.keys()
    if replaced & {"epochs", "steps"}:
        replaced |= {"epochs", "steps"}
    return dataclasses.replace(
        options, **{name: value for name, value in saved.items() if name not in replaced}
    )


def _is_valid(values: Any) -> bool:
    return (
        isinstance(values, dict)
        and values.get("format") == _FORMAT
        and {*values} <= {"format", _DIGEST, *_KEPT}
        and all(name in values and _KEPT[name].accepts(values[name]) for name in _KEPT)
    )


def _digest(values: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in values.items() if name != _DIGEST}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
