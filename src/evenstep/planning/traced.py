"""From the trace of a training on one device to the work of a step; and a plan beside a run."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep.errors import InputError
from evenstep.planning.described import Work
from evenstep.planning.prediction import Prediction
from evenstep.profiling.reader import Event, TraceAccount, read_trace

_MOST_NUMBER = 10**15
_WARM_UP = 2  # steps that are left out where there are more: the first ones check the contract
_FEW = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A plan beside a run.

    Attributes:
        devices: the devices of the run.
        predicted, measured: examples a second.
        error: predicted over measured, minus 1.
        within: whether the measured figure is in the predicted range.
    """

    devices: int
    predicted: float
    measured: float
    error: float
    within: bool


def facts_of(parameters: Iterable[Any], optimizer: Any, examples: int) -> dict[str, int]:
    """Return what a trace has to know of a training, for its `facts["training"]`.

    Args:
        parameters: of the model.
        optimizer: after its first step, when it has its state.
        examples: of a batch.
    """
    trained = [one for one in parameters if one.requires_grad]
    state = [value for own in optimizer.state.values() for value in own.values()]
    return {
        "examples": examples,
        "gradient_nbytes": sum(one.nbytes for one in trained),
        "state_nbytes": sum(one.nbytes for one in state if hasattr(one, "nbytes")),
    }


def work_of_trace(file: str | Path, *, name: str = "the traced training") -> Work:
    """Return the work of a step, from the trace of a training on one device.

    Args:
        file: written by `evenstep train --devices 1 --trace FILE`, or by `Trainer.trace.save` after
            `trace.facts["training"] = facts_of(...)`.
        name: what is trained.

    Raises:
        InputError: the file is not such a trace.
    """
    account, events = read_trace(file)
    if len(account.devices) != 1:
        raise InputError(
            f"{file} is the trace of {len(account.devices)} devices: a plan starts from a training "
            f"on one (evenstep train --devices 1 --trace FILE)"
        )
    facts = _training(account, file)
    return work_of_events(events, name=name, device=account.devices[0].device, **facts)


def work_of_events(events: Sequence[Event], *, name: str, device: str, **facts: Any) -> Work:
    """Return the work of a step from the bars of a trace, without its first steps."""
    shards: dict[int, list[float]] = defaultdict(list)
    steps = {one.step: one for one in events if one.category == "step" and one.step is not None}
    updates = {one.step: one.seconds for one in events if one.category == "update"}
    for one in events:
        if one.is_shard and one.step in steps:
            assert one.step is not None
            shards[one.step].append(one.seconds)
    most = max(map(len, shards.values()), default=0)
    whole = sorted(step for step, own in shards.items() if len(own) == most and step in updates)
    kept = whole[_WARM_UP:] if len(whole) >= _FEW else whole
    if not kept:
        raise InputError("the trace has no step with shards and an update: train for some steps")
    rest_s = [steps[step].seconds - sum(shards[step]) - updates[step] for step in kept]
    waits_s = [one.seconds for one in events if one.row == "steps" and one.category == "wait"]
    loads_s = [one.seconds for one in events if one.row == "front end" and one.category == "load"]
    return Work(
        name=name,
        shards=most,
        shard_s=tuple(seconds for step in kept for seconds in shards[step]),
        update_s=statistics.median(updates[step] for step in kept),
        rest_s=max(0.0, statistics.median(rest_s)),
        load_s=statistics.median(loads_s or waits_s or [0.0]),
        device=device.partition(":")[0],
        **facts,
    )


def compared(prediction: Prediction, file: str | Path) -> Comparison:
    """Return a prediction beside the trace of a run of that layout.

    Raises:
        InputError: the file is no trace of a training, or one of different devices.
    """
    account, events = read_trace(file)
    devices, planned = len(account.devices), prediction.arrangement.per_process
    if devices != min(planned, prediction.arrangement.devices):
        raise InputError(
            f"{file} is the trace of a process with {devices} devices, and the plan is for "
            f"{planned}: add --devices {devices}"
        )
    examples = _training(account, file)["examples"]
    took_s = [one.seconds for one in events if one.row == "steps" and one.category == "step"]
    kept = took_s[_WARM_UP:] if len(took_s) >= _FEW else took_s
    measured = examples / statistics.median(kept)
    return Comparison(
        devices=prediction.arrangement.devices,
        predicted=prediction.examples_per_s,
        measured=measured,
        error=prediction.examples_per_s / measured - 1,
        within=prediction.least <= measured <= prediction.most,
    )


def _training(account: TraceAccount, file: str | Path) -> Mapping[str, int]:
    facts = {key: account.training.get(key) for key in ("examples", "gradient_nbytes")}
    state = account.training.get("state_nbytes", 0)
    found = {key: value for key, value in facts.items() if value is not None}
    if len(found) < len(facts) or not 0 < found["examples"] < _MOST_NUMBER:
        raise InputError(
            f"{file} does not say how many examples a batch has and how large the model is: "
            f"write it with evenstep train --trace FILE of this version"
        )
    return {**found, "state_nbytes": state}
