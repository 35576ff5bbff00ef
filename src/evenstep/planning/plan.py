"""`evenstep.plan`: what more devices would bring, for several numbers of devices."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from evenstep.errors import InputError, shown
from evenstep.limits import MOST_SHARDS
from evenstep.planning.described import Arrangement, Divide, Link, Machine, Work
from evenstep.planning.prediction import Prediction, predict, usual_s
from evenstep.planning.traced import work_of_trace

MOST_PLANNED = 100_000
"""The largest number of devices in a plan."""

_UNITS = {"bit": 1 / 8, "B": 1.0}
_PREFIXES = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([KkMGT]?)(bit|B)(?:/s|ps)?")
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s)")
_USABLE = 0.94  # of a line rate: Ethernet's frames and TCP's headers take the rest
_USUAL_LATENCY_S = 50e-6
_BEST_SHARDS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_WORTH = 0.1  # the least that twice as many devices must bring
_EFFICIENT = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Predictions for several numbers of devices.

    Attributes:
        work: what is trained, as it was measured on one device.
        machine: the machine.
        predictions: for each number of devices.
        pays_until: the number of devices after which twice as many bring less than 10%.
        advice: sentences: what another V or batch would change.
    """

    work: Work
    machine: Machine
    predictions: tuple[Prediction, ...]
    pays_until: int
    advice: tuple[str, ...]

    @property
    def unseen(self) -> tuple[str, ...]:
        """What any of the predictions rests on that was not measured."""
        found = (text for one in self.predictions for text in one.unseen)
        return tuple(dict.fromkeys((*found, *self.work.lacks)))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON object."""
        whole = dataclasses.asdict(self)
        whole["unseen"] = self.unseen
        return _without_infinities(whole)  # type: ignore[no-any-return]


def plan(
    work: Work | None = None,
    *,
    trace: str | Path | None = None,
    devices: Iterable[int] = (1, 2, 4, 8, 16),
    machine: Machine | None = None,
    network: str | Link | None = None,
    per_machine: int | None = None,
    per_process: int | None = None,
    divide: Divide = "data",
    stages: int = 1,
    shards: int | None = None,
    batch_size: int | None = None,
    **layout: Any,
) -> Plan:
    """Predict what more devices would bring, from a step that was measured on one.

        plan = evenstep.plan(trace="run.trace", devices=(1, 2, 4), network="10Gbit,50us")
        print(plan.predictions[-1].efficiency, plan.predictions[-1].reasons)

    Args:
        work: the step; None for that of a trace.
        trace: what `evenstep train --devices 1 --trace FILE` wrote (see `work_of_trace`).
        devices: numbers of devices.
        machine: what was measured of the machine; None for one device in each, which nothing
            slows down.
        network: what connects machines, such as "10Gbit", "10Gbit,50us" or "1Gbit,50us,shared"
            (all machines share it); None for the machine's own.
        per_machine: the devices of a machine; None for the machine's own number.
        per_process: the devices of a process; None for all of a machine.
        divide: what is divided besides the batch: "data", "owners", "stages" or "slices".
        stages: the number of stages of the network.
        shards: V; None for the V that was measured.
        batch_size: the examples of a batch; None for those that were measured.
        **layout: further fields of `Arrangement`.

    Raises:
        InputError: an argument can't be used.
    """
    if (work is None) == (trace is None):
        raise InputError("a plan starts from one step: give either work= or trace=")
    if work is None:
        assert trace is not None
        work = work_of_trace(trace)
    counts = sorted({*devices})
    if not counts or not all(isinstance(n, int) and 0 < n <= MOST_PLANNED for n in counts):
        raise InputError(f"got devices={counts!r:.60}: give numbers from 1 to {MOST_PLANNED:,}")
    machine = machine or Machine()
    if network is not None:
        link = parse_network(network) if isinstance(network, str) else network
        machine = dataclasses.replace(machine, network=link)
    shards, examples = shards or work.shards, batch_size or work.examples
    if not 1 <= shards <= min(MOST_SHARDS, examples):
        raise InputError(
            f"got shards={shards} for batches of {examples} examples: give at most one shard for "
            f"each example, and at most {MOST_SHARDS:,}"
        )
    resized = work.resized(shards=shards, examples=examples)
    inside = per_machine or machine.devices
    together = per_process or (stages if divide == "stages" else inside)
    if max(counts) > inside and math.isinf(machine.network.bytes_per_s):
        raise InputError(
            f"got {max(counts)} devices, {inside} in each machine, and no network between them: "
            f"give network='1Gbit,50us'"
        )
    layout = {"divide": divide, "stages": stages, **layout}

    def arranged(count: int) -> Arrangement:
        if divide == "stages" and count % stages:
            raise InputError(
                f"got {stages} stages and {count} devices: give a multiple of {stages} devices"
            )
        return Arrangement(
            devices=count, per_machine=inside, per_process=min(together, inside), **layout
        )

    predictions = tuple(predict(resized, machine, arranged(count)) for count in counts)
    if (shards, examples) != (work.shards, work.examples):
        told = f"V = {shards} with batches of {examples:,}: V = {work.shards} with batches of "
        told += f"{work.examples:,} was measured"
        predictions = tuple(_with_unseen(one, told) for one in predictions)
    most = arranged(counts[-1])
    return Plan(
        work=resized,
        machine=machine,
        predictions=predictions,
        pays_until=_pays_until(predictions),
        advice=tuple(_advice(resized, machine, most)),
    )


def parse_network(text: str) -> Link:
    """Return the link that a text describes: a rate, and maybe a latency and "shared"."""
    rate, *others = (part.strip() for part in text.split(","))
    found = _RATE.fullmatch(rate)
    latency_s, shared = _USUAL_LATENCY_S, False
    for other in others:
        if other == "shared":
            shared = True
        elif timed := _LATENCY.fullmatch(other):
            latency_s = float(timed[1]) * _SECONDS[timed[2]]
        else:
            found = None
    bytes_per_s = 0.0
    if found and len(rate) < 40:
        bytes_per_s = float(found[1]) * _PREFIXES[found[2]] * _UNITS[found[3]] * _USABLE
    if not (1e3 <= bytes_per_s <= 1e14 and latency_s <= 10):
        raise InputError(
            f"got network {shown(text)}: give bits or bytes a second (10 kbit to 100 Tbit), and "
            f"maybe a latency of at most 10 s, such as 10Gbit,50us or 1Gbit,1ms,shared"
        )
    return Link(bytes_per_s=bytes_per_s, latency_s=latency_s, shared=shared)


def _with_unseen(prediction: Prediction, text: str) -> Prediction:
    return dataclasses.replace(prediction, unseen=(*prediction.unseen, text))


def _pays_until(predictions: Sequence[Prediction]) -> int:
    """Return the number of devices after which no number brings its worth.

    From n to m devices, at least (m / n) ** log2(1.1) times the speed are wanted.
    """
    best = predictions[0]
    for one in predictions[1:]:
        grown = one.arrangement.devices / best.arrangement.devices
        if one.examples_per_s >= best.examples_per_s * grown ** math.log2(1 + _WORTH):
            best = one
    return best.arrangement.devices


def _advice(work: Work, machine: Machine, arrangement: Arrangement) -> Iterator[str]:
    """Yield what another V or another batch would bring on these devices."""
    devices = arrangement.devices
    if devices == 1:
        return
    step_s = usual_s(work, machine, arrangement)
    most = min(work.examples, 8 * devices)
    tried = [v for v in _BEST_SHARDS if devices <= 2 * v and v <= most and v != work.shards]
    found = {v: usual_s(work.resized(shards=v), machine, arrangement) for v in tried}
    best = min(found, key=lambda v: found[v], default=None)
    if best is not None and found[best] < 0.95 * step_s:
        yield (
            f"on {devices} devices V = {best} would be {step_s / found[best]:.2f} times as fast "
            f"(V belongs to the experiment: it changes the result)"
        )
    examples = work.examples
    for _ in range(7):
        larger = work.resized(examples=examples)
        alone_s = usual_s(larger, machine, Arrangement())
        if alone_s / usual_s(larger, machine, arrangement) / devices >= _EFFICIENT:
            if examples > work.examples:
                yield (
                    f"{devices} devices reach an efficiency of {_EFFICIENT:.0%} from batches of "
                    f"about {examples:,} on"
                )
            return
        examples *= 2


def _without_infinities(value: Any) -> Any:
    """Return a value for JSON, which has no infinity: None in its place."""
    if isinstance(value, dict):
        return {key: _without_infinities(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(_without_infinities, value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
