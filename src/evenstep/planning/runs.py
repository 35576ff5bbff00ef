"""A plan beside a run, of which evenstep wrote a trace or a record of results."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep.errors import InputError, counted
from evenstep.planning.described import Work
from evenstep.planning.prediction import Prediction
from evenstep.planning.traced import FEW, WARM_UP, training_facts
from evenstep.profiling.reader import read_trace

_MOST_NBYTES = 1 << 20  # of a record of results
_MOST_PLACES = 10**6
_SPEED = "examples_per_second"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """The speed of a run, and its layout.

    Attributes:
        devices: those of all processes.
        processes, machines: their numbers.
        shards: V; None if it is not known.
        examples: of a batch.
        examples_per_s: the speed.
    """

    devices: int
    processes: int
    machines: int
    shards: int | None
    examples: int
    examples_per_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A plan beside a run.

    Attributes:
        devices, processes: of the run.
        predicted, measured: examples a second.
        error: predicted over measured, minus 1.
        within: whether the measured figure is in the predicted range.
    """

    devices: int
    processes: int
    predicted: float
    measured: float
    error: float
    within: bool


def measured_run(file: str | Path) -> MeasuredRun:
    """Return the speed and the layout of a run.

    Args:
        file: what `evenstep train --json FILE` wrote, or `--trace FILE`. With several processes it
            is the first one that writes them, and all have as many devices as it has.

    Raises:
        InputError: the file is something else.
    """
    if not Path(file).exists():
        raise InputError(
            f"{file} does not exist: give a file that evenstep train --json FILE or --trace FILE "
            f"wrote"
        )
    results = _results(Path(file))
    if results is None:
        return _run_of_trace(file)
    try:
        return _run_of_results(results)
    except KeyError as error:
        raise InputError(f"{file} has no results of a training: {error} is missing") from None
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{file} has no results of a training ({error}): give a file that evenstep train "
            f"--json FILE of this version wrote"
        ) from None


def compared(work: Work, predictions: Sequence[Prediction], run: MeasuredRun) -> Comparison:
    """Return a run beside the prediction for its layout.

    Raises:
        InputError: there is none.
    """
    found = next((p for p in predictions if p.arrangement.devices == run.devices), None)
    if found is None:
        raise InputError(
            f"the run had {counted(run.devices, 'device')}, which the plan does not have: add "
            f"{run.devices} to --devices"
        )
    planned = found.arrangement
    for what, its_own, of_plan, fix in (
        ("processes", run.processes, len(planned.processes), "per-process"),
        ("machines", run.machines, planned.machines, "per-machine"),
    ):
        if its_own != of_plan:
            each = math.ceil(run.devices / its_own)
            raise InputError(
                f"the run had {its_own} {what}, and the plan for {counted(run.devices, 'device')} "
                f"has {of_plan}: give --{fix} {each}"
            )
    for what, ran, of_plan, fix in (
        ("shards", run.shards, work.shards, "shards"),
        ("examples in a batch", run.examples, work.examples, "batch-size"),
    ):
        if ran not in (None, of_plan):
            raise InputError(
                f"the run had {ran:,} {what}, and the plan has {of_plan:,}: give --{fix} {ran}"
            )
    return Comparison(
        devices=run.devices,
        processes=run.processes,
        predicted=found.examples_per_s,
        measured=run.examples_per_s,
        error=found.examples_per_s / run.examples_per_s - 1,
        within=found.least <= run.examples_per_s <= found.most,
    )


def _run_of_trace(file: str | Path) -> MeasuredRun:
    account, events = read_trace(file)
    examples, known = training_facts(account, file)["examples"], account.training
    took_s = [one.seconds for one in events if one.row == "steps" and one.category == "step"]
    kept = took_s[WARM_UP:] if len(took_s) >= FEW else took_s
    step_s = statistics.median(kept)
    if not step_s:
        raise InputError(f"{file} has steps that take no time: train for some steps")
    processes = known.get("processes") or 1
    return MeasuredRun(
        devices=len(account.devices) * processes,
        processes=processes,
        machines=known.get("machines") or 1,
        shards=known.get("shards", account.shards if processes == 1 else None),
        examples=examples,
        examples_per_s=examples / step_s,
    )


def _run_of_results(results: Mapping[str, Any]) -> MeasuredRun:
    devices, speed = results["devices"], results[_SPEED]
    if not isinstance(devices, list) or not 0 < len(devices) < _MOST_PLACES:
        raise ValueError(f"the devices {devices!r:.40}")
    if isinstance(speed, bool | str) or speed is None or not 0 < float(speed) < math.inf:
        raise ValueError(f"{_SPEED} is {speed!r:.40}")
    processes = _count(results, "processes", 1)
    return MeasuredRun(
        devices=len(devices) * processes,
        processes=processes,
        machines=_count(results, "machines", 1),
        shards=_count(results, "shards"),
        examples=_count(results, "batch_size"),
        examples_per_s=float(speed),
    )


def _count(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = fields[name] if default is None else fields.get(name, default)
    if type(value) is not int or not 0 < value < _MOST_PLACES:
        raise ValueError(f"{name} is {value!r:.40}")
    return value


def _results(path: Path) -> Mapping[str, Any] | None:
    """Return the object in a file of `evenstep train --json`; None if it is something else."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_NBYTES:
            return None
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and _SPEED in found else None
