"""From the trace of a training on one device to the work of a step."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep.errors import InputError, counted
from evenstep.planning.described import Work
from evenstep.profiling.reader import Event, TraceAccount, read_trace

_MOST_NUMBER = 10**15
WARM_UP = 2  # steps that are left out where there are more: the first ones check the contract
FEW = 5
_RECORD = b'"evenstep record"'
_LACKS = (
    "the memory of activations, which a trace does not hold: memory is without it",
    "what a shard costs whatever its size, which a trace does not hold: another V or batch counts "
    "in proportion",
)


def facts_of(
    parameters: Iterable[Any], optimizer: Any, examples: int, **places: int
) -> dict[str, int]:
    """Return what a trace has to know of a training, for its `facts["training"]`.

    Args:
        parameters: of the model.
        optimizer: after its first step, when it has its state.
        examples: of a batch.
        **places: of a training in several processes: `shards` (V), `processes` and `machines`.
    """
    trained = [one for one in parameters if one.requires_grad]
    state = [value for own in optimizer.state.values() for value in own.values()]
    return {
        "examples": examples,
        "gradient_nbytes": sum(one.nbytes for one in trained),
        "state_nbytes": sum(one.nbytes for one in state if hasattr(one, "nbytes")),
        **places,
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
    _refuse_record(Path(file))
    account, events = read_trace(file)
    processes = account.training.get("processes", 1)
    if len(account.devices) != 1 or processes != 1:
        places = counted(len(account.devices), "device")
        places += f" of one of {processes} processes" if processes != 1 else ""
        raise InputError(
            f"{file} is the trace of {places}: a plan starts from a training on one device "
            f"(evenstep train --devices 1 --trace FILE)"
        )
    facts = training_facts(account, file)
    try:
        work = work_of_events(events, name=name, device=account.devices[0].device, **facts)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    return dataclasses.replace(work, lacks=_LACKS)


def work_of_events(events: Sequence[Event], *, name: str, device: str, **facts: Any) -> Work:
    """Return the work of a step from the bars of a trace, without its first steps."""
    shards: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    steps = {one.step: one for one in events if one.category == "step" and one.step is not None}
    updates = {one.step: one.seconds for one in events if one.category == "update"}
    for one in events:
        if one.is_shard and one.step in steps:
            assert one.step is not None
            assert one.shard is not None
            shards[one.step][one.shard] += one.seconds  # in stages, a shard is several bars
    most = max(map(len, shards.values()), default=0)
    whole = sorted(step for step, own in shards.items() if len(own) == most and step in updates)
    kept = whole[WARM_UP:] if len(whole) >= FEW else whole
    if not kept:
        raise InputError("the trace has no step with shards and an update: train for some steps")
    alone_s = _seconds_alone(steps.values())
    rest_s = [alone_s[step] - sum(shards[step].values()) - updates[step] for step in kept]
    waits_s = [one.seconds for one in events if one.row == "steps" and one.category == "wait"]
    loads_s = [one.seconds for one in events if one.row == "front end" and one.category == "load"]
    return Work(
        name=name,
        shards=most,
        shard_s=tuple(seconds for step in kept for seconds in shards[step].values()),
        update_s=statistics.median(updates[step] for step in kept),
        rest_s=max(0.0, statistics.median(rest_s)),
        load_s=statistics.median(loads_s or waits_s or [0.0]),
        device=device.partition(":")[0],
        **facts,
    )


def training_facts(account: TraceAccount, file: str | Path) -> Mapping[str, int]:
    """Return what a trace knows of its training: the fields of `Work` that it has no times for.

    Raises:
        InputError: it knows too little.
    """
    facts = {key: account.training.get(key) for key in ("examples", "gradient_nbytes")}
    found = {key: value for key, value in facts.items() if value is not None}
    if len(found) < len(facts) or not 0 < found["examples"] < _MOST_NUMBER:
        raise InputError(
            f"{file} does not say how many examples a batch has and how large the model is: "
            f"write it with evenstep train --trace FILE of this version"
        )
    return {**found, "state_nbytes": account.training.get("state_nbytes", 0)}


def _seconds_alone(steps: Iterable[Event]) -> dict[int | None, float]:
    """Return the seconds of each step, without those in which an earlier one was not done."""
    found, ended_s = {}, 0.0
    for one in sorted(steps, key=lambda one: one.ended_s):
        found[one.step] = max(0.0, one.ended_s - max(one.began_s, ended_s))
        ended_s = one.ended_s
    return found


def _refuse_record(path: Path) -> None:
    """Refuse what `evenstep record` wrote: a folder, or the file of a process.

    Raises:
        InputError: it is a record.
    """
    try:
        if path.is_dir():
            is_record = any(path.glob("process-*.jsonl"))
        elif path.is_file():
            with path.open("rb") as file:
                is_record = _RECORD in file.read(1000)
        else:
            return
    except OSError:
        return
    if is_record:
        raise InputError(
            f"{path} is a record: it holds what was computed, and no times of shards, sums or "
            f"updates. Trace some steps instead: evenstep train --devices 1 --trace FILE"
        )
