"""What a layout would bring: speed with a range, efficiency, memory, and what binds."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Iterator

from evenstep.planning.described import Arrangement, Link, Machine, Work
from evenstep.planning.formulas import bubble, most_sliced, most_speed_up, partial_sums
from evenstep.planning.simulation import StepTimes, divided, simulate

PARTS = ("compute", "wait", "exchange", "end")
"""Where the devices' time goes: computing, waiting for each other, the exchange, the step's end."""

BOUND = {
    "compute": "the devices compute all the time",
    "memory": "devices of a machine slow each other down (memory, caches, the interpreter)",
    "network": "the exchange of gradients",
    "V": "the shards don't divide evenly among the devices",
    "bubbles": "stages wait for each other",
    "slices": "what is outside of slices, uneven slices, and the meetings in each layer",
    "stragglers": "shards and devices vary, and the slowest is waited for",
    "loader": "batches are made slower than they are trained on",
    "update": "the update, which is made once for all devices",
}
"""What may bind a step, in words."""

_MOST_EVENTS = 10_000  # roughly, of all steps that are simulated for one figure
_FEWEST_STEPS, _MOST_STEPS = 3, 24
_MARGIN, _UNSEEN_MARGIN = 0.04, 0.08  # of the speed: the model's own, and for each thing unseen
_SLIGHT = 0.02  # a gain that does not count
_PAUSE_S = 0.2  # the least time after which TCP forgets its window (Linux)
_FIRST_WINDOW_NBYTES = 10 * 1460


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a layout would bring.

    Attributes:
        arrangement: the layout.
        step_s: the median seconds of a step.
        examples_per_s, least, most: examples a second, and the range that they may lie in.
        speed_up: how many times as fast as one device.
        efficiency: the speed-up over the number of devices.
        memory_nbytes: what a device holds: parameters, gradients, optimizer state and activations;
            without activations if those are not known.
        fits: whether that fits the memory of the machine; None if either is not known.
        shares: the share of the devices' time in each of `PARTS`.
        binds: what binds, a key of `BOUND`.
        reasons: sentences with the numbers that explain it.
        unseen: what the prediction rests on that nobody measured.
    """

    arrangement: Arrangement
    step_s: float
    examples_per_s: float
    least: float
    most: float
    speed_up: float
    efficiency: float
    memory_nbytes: int
    fits: bool | None
    shares: dict[str, float]
    binds: str
    reasons: tuple[str, ...]
    unseen: tuple[str, ...]


def predict(work: Work, machine: Machine, arrangement: Arrangement, *, seed: int = 0) -> Prediction:
    """Return what a layout would bring."""
    times = _times(work, machine, arrangement, seed, _FEWEST_STEPS)
    seconds = sorted(one.seconds for one in times)
    step_s = statistics.median(seconds)
    alone_s = usual_s(work, machine, Arrangement(), seed=seed)
    unseen = tuple(_unseen(work, machine, arrangement, step_s))
    margin = (_MARGIN + _UNSEEN_MARGIN * len(unseen)) * (arrangement.devices > 1)
    spread = statistics.stdev(seconds) / step_s / math.sqrt(len(seconds))
    off = math.hypot(margin, 2 * spread)
    speed = work.examples / step_s
    held = memory_of(work, machine, arrangement)
    binds = _binds(work, machine, arrangement, step_s, seed)
    known = machine.memory_nbytes is not None and work.activation_nbytes is not None
    together = 1 if machine.has_own_memory else min(arrangement.devices, arrangement.per_machine)
    return Prediction(
        arrangement=arrangement,
        step_s=step_s,
        examples_per_s=speed,
        least=speed / (1 + off),
        most=speed * (1 + off),
        speed_up=alone_s / step_s,
        efficiency=alone_s / step_s / arrangement.devices,
        memory_nbytes=held,
        fits=held * together <= machine.memory_nbytes if known else None,  # type: ignore[operator]
        shares=_shares(times),
        binds=binds,
        reasons=tuple(_reasons(work, machine, arrangement, binds, step_s)),
        unseen=unseen,
    )


def usual_s(work: Work, machine: Machine, arrangement: Arrangement, *, seed: int = 0) -> float:
    """Return the median seconds of a step."""
    return statistics.median(one.seconds for one in _times(work, machine, arrangement, seed))


def memory_of(work: Work, machine: Machine, arrangement: Arrangement) -> int:
    """Return the bytes that a device holds, at most.

    CPU devices of a process share its parameters, its optimizer's state and the gradients' sum:
    each counts as its part of them.
    """
    processes = len(arrangement.processes)
    sharing = 1 if machine.has_own_memory else len(arrangement.processes[0])
    values = float(work.gradient_nbytes)
    summed, state = values, float(work.state_nbytes)
    if arrangement.divide == "owners":
        summed, state = values / processes, state / processes
    buffers = values if processes > 1 and arrangement.divide != "owners" else 0.0
    own = values  # the gradients of the shard that it computes
    active = float(work.activation_nbytes or 0)
    if arrangement.divide == "slices":  # all devices of a process compute one shard
        own, active = own / sharing, active / sharing
    if arrangement.divide == "stages":  # stage 0 holds S shards of its part of the network
        own = values / arrangement.stages
        if machine.has_own_memory:
            values, summed, state = (x / arrangement.stages for x in (values, summed, state))
    return math.ceil((values + summed + state + buffers) / sharing + own + active)


def _times(
    work: Work, machine: Machine, arrangement: Arrangement, seed: int, fewest: int = 1
) -> list[StepTimes]:
    """Simulate as many steps as are worth their time; the same seed gives the same steps."""
    generator = random.Random(seed)  # noqa: S311
    processes = len(arrangement.processes)
    events = work.shards + 16 * processes * (processes > 1)
    steps = min(max(_MOST_EVENTS // events, fewest), _MOST_STEPS)
    return [simulate(work, machine, arrangement, generator) for _ in range(steps)]


def _shares(times: list[StepTimes]) -> dict[str, float]:
    """Return where the devices' time goes, added up over steps and devices."""
    whole = sum(one.seconds for one in times)
    busy = sum(statistics.fmean(one.busy_s) for one in times)
    exchanged = sum(one.exchanged_s for one in times)
    ended = sum(one.ended_s for one in times)
    parts = (busy, whole - busy - exchanged - ended, exchanged, ended)
    return {part: max(0.0, spent) / whole for part, spent in zip(PARTS, parts, strict=True)}


def _without(
    work: Work, machine: Machine, arrangement: Arrangement
) -> Iterator[tuple[str, tuple[Work, Machine, Arrangement]]]:
    """Yield what may bind, and the same step without it."""
    change = dataclasses.replace
    free = change(machine, slowdown=(1.0,), process_slowdown=(1.0,))
    yield "memory", (work, free, arrangement)
    fast = change(machine, network=Link(), local=Link(), copied_bytes_per_s=math.inf, shared_s=0.0)
    yield "network", (work, fast, arrangement)
    steady = change(work, shard_s=(work.usual_s,))
    yield "stragglers", (steady, change(machine, step_spread=0.0), arrangement)
    yield "loader", (change(work, load_s=0.0), machine, arrangement)
    yield "update", (change(work, update_s=0.0, rest_s=0.0), machine, arrangement)
    if arrangement.divide == "stages":
        yield "bubbles", (_cut_finely(work, 64 * arrangement.devices), machine, arrangement)
    elif arrangement.divide == "slices":
        count = 64 * len(arrangement.processes[0])
        ideal = change(work, sliced_s=work.usual_s, slices=count, meetings=0)
        yield "slices", (ideal, machine, arrangement)
    else:
        even = arrangement.devices * math.ceil(work.shards / arrangement.devices)
        yield "V", (_cut_finely(work, even), machine, arrangement)


def _cut_finely(work: Work, shards: int) -> Work:
    """Return the work with more shards that take as long together."""
    shorter = tuple(one * work.shards / shards for one in work.shard_s)
    return dataclasses.replace(work, shards=shards, shard_s=shorter)


def _binds(work: Work, machine: Machine, arrangement: Arrangement, step_s: float, seed: int) -> str:
    """Return that without which the step would be the shortest; "compute" if nothing counts."""
    gains = {
        what: 1 - usual_s(*without, seed=seed) / step_s
        for what, without in _without(work, machine, arrangement)
    }
    what = max(gains, key=lambda one: gains[one])
    return what if gains[what] > _SLIGHT else "compute"


def _reasons(
    work: Work, machine: Machine, arrangement: Arrangement, binds: str, step_s: float
) -> Iterator[str]:
    """Yield sentences with the numbers that a reader can check."""
    devices, shards = arrangement.devices, work.shards
    if arrangement.divide == "stages":
        idle = bubble(shards, arrangement.stages)
        yield (
            f"V = {shards} in {arrangement.stages} stages: the devices are idle for at least "
            f"{idle:.0%} of the time"
        )
    elif arrangement.divide == "slices":
        yield from _reasons_of_slices(work, machine, len(arrangement.processes[0]))
    elif not arrangement.speeds:
        most = most_speed_up(shards, devices)
        if devices > shards:
            yield f"V = {shards} on {devices} devices: {devices - shards} get no work"
        if most < devices:
            yield f"V = {shards} on {devices} devices: at most {most:.2f} times"
    processes = len(arrangement.processes)
    if arrangement.machines > 1:
        speeds = [sum(map(arrangement.speed, own)) for own in arrangement.processes]
        runs = divided(shards, speeds)
        terms = max(partial_sums(run.start, run.stop, shards) for run in runs)
        if arrangement.exchange != "canonical":
            terms = 1
        sent = (max(terms, 1) + 1) * work.gradient_nbytes * (processes - 1) / processes
        rate = machine.network.bytes_per_s
        wire = (
            "" if math.isinf(rate) else f", {sent / rate * 1e3:,.3g} ms of a step at {rate:.3g} B/s"
        )
        yield f"each process sends {sent / 1e6:,.3g} MB in a step{wire}"
        if terms > 1:
            yield (
                f"V = {shards} over {processes} processes: a process sends up to {terms} partial "
                f"sums; a power of two of processes, or of shards for each, sends 1"
            )
        if machine.network.latency_s > 0.005 * step_s:
            rounds = 2 if work.gradient_nbytes * (processes - 1) <= 64 << 10 else 4
            late_ms = rounds * machine.network.latency_s * 1e3
            yield f"a step waits for {rounds} latencies of the network: {late_ms:,.3g} ms"
    yield f"what binds: {BOUND[binds]}"


def _reasons_of_slices(work: Work, machine: Machine, devices: int) -> Iterator[str]:
    share = min(1.0, work.sliced_s / work.usual_s)
    most = most_sliced(share, work.slices, devices)
    yield (
        f"S = {work.slices} on {devices} devices of a process, {share:.0%} of a shard in slices: "
        f"at most {most:.2f} times"
    )
    meetings = work.meetings * work.shards
    yield (
        f"the devices meet {meetings:,} times in a step: {meetings * machine.meeting_s * 1e3:,.3g} "
        f"ms"
    )


def _unseen(work: Work, machine: Machine, arrangement: Arrangement, step_s: float) -> Iterator[str]:
    """Yield what the prediction rests on that was not measured."""
    inside = min(arrangement.devices, arrangement.per_machine)
    seen = len(machine.slowdown if arrangement.per_process > 1 else machine.process_slowdown)
    if inside > seen:
        yield (
            f"how {inside} devices of one machine slow each other down: measured with {seen}"
            if seen > 1
            else f"how {inside} devices of one machine slow each other down: not measured"
        )
    if arrangement.machines > 1:
        yield "several machines: the network is as it was given, and free of other traffic"
    if work.device != "cpu" and arrangement.devices > 1:
        yield f"several devices of the kind {work.device}: one was measured"
    if arrangement.divide == "slices" and arrangement.per_process > 1:
        if not machine.meeting_s:
            yield "how long devices take to meet in each layer: not measured"
        if machine.has_own_memory:
            yield "what devices with memory of their own send each other in each layer"
    if (slow_s := _slow_start_s(work, machine, arrangement)) > 0.01 * step_s:
        yield (
            f"TCP begins slowly after a pause, such as a backward pass of more than "
            f"{_PAUSE_S} s: up to {slow_s * 1e3:,.3g} ms of a step"
        )


def _slow_start_s(work: Work, machine: Machine, arrangement: Arrangement) -> float:
    """Return how long TCP takes after a pause until it sends at the rate of the network.

    Its window begins with 10 segments again (RFC 6928, RFC 5681) and doubles in each round trip.
    """
    network = machine.network
    computing_s = work.usual_s * work.shards / arrangement.devices
    if arrangement.machines == 1 or computing_s < _PAUSE_S or not work.gradient_nbytes:
        return 0.0
    needed = min(2 * network.latency_s * network.bytes_per_s, work.gradient_nbytes)
    return 2 * network.latency_s * max(0.0, math.log2(needed / _FIRST_WINDOW_NBYTES))
