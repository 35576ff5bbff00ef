"""The event simulation of a step: shards on devices, the exchange beside them, and the update."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from functools import partial

from evenstep.errors import InputError
from evenstep.planning.described import Arrangement, Machine, Work
from evenstep.planning.events import Events
from evenstep.planning.exchanging import Reduction
from evenstep.planning.formulas import partial_sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Where the seconds of a simulated step went.

    Attributes:
        seconds: the whole step.
        busy_s: for each device, how long it computed.
        computed_s: when the last device had computed its last shard.
        exchanged_s: the seconds after that until the gradients were added up.
        ended_s: the seconds of the update and the rest, and of loading that nothing hides.
        held: for each device with a stage, the most shards that it held at a time; empty without
            stages.
    """

    seconds: float
    busy_s: tuple[float, ...]
    computed_s: float
    exchanged_s: float
    ended_s: float
    held: tuple[int, ...] = ()


def simulate(
    work: Work, machine: Machine, arrangement: Arrangement, generator: random.Random
) -> StepTimes:
    """Return the times of one step, in which shards take times that were measured."""
    step = _Step(work, machine, arrangement, generator)
    step.run()
    computed_s = max(step.free_s)
    exchanged_s = max(0.0, step.added_up_s - computed_s)
    is_owned = arrangement.divide == "owners" and len(arrangement.processes) > 1
    update_s = 0.0 if is_owned else work.update_s
    ended_s = work.rest_s + update_s
    within_s = computed_s + exchanged_s + ended_s
    load_s = work.load_s * step.largest_part
    visible_s = max(0.0, load_s - within_s) if arrangement.in_flight > 1 else load_s
    return StepTimes(
        seconds=within_s + visible_s,
        busy_s=tuple(step.busy_s),
        computed_s=computed_s,
        exchanged_s=exchanged_s,
        ended_s=ended_s + visible_s,
        held=tuple(most for replica in step.pipelines for most in replica.most_held),
    )


class _Step:
    """A step in progress."""

    def __init__(
        self, work: Work, machine: Machine, arrangement: Arrangement, generator: random.Random
    ) -> None:
        self._work, self._machine, self._arrangement = work, machine, arrangement
        if arrangement.divide == "slices" and not work.slices:
            raise InputError("no layer of the work is cut into slices: measure it with --slices S")
        self._random = generator
        self._events = Events()
        self._processes = arrangement.processes
        spread = machine.step_spread
        self._luck = [  # of each device in this step
            max(0.1, generator.gauss(1.0, spread)) if spread else 1.0
            for _ in range(arrangement.devices)
        ]
        self._process_of = [p for p, own in enumerate(self._processes) for _ in own]
        self.busy_s = [0.0] * arrangement.devices
        self.free_s = [0.0] * arrangement.devices
        self._ends_s = [0.0] * arrangement.devices  # of the shard that a device computes
        self._working = [0] * arrangement.machines
        self.added_up_s = 0.0
        self.pipelines: list[_Pipeline] = []
        self._reduction: Reduction | None = None
        runs = divided(work.shards, [self._speed_of(own) for own in self._processes])
        if len(self._processes) > 1:
            partials = [max(1, partial_sums(run.start, run.stop, work.shards)) for run in runs]
            self._reduction = Reduction(
                self._events, work, machine, arrangement, partials, self._note_sum
            )
        self._runs = [
            deque(part)
            for own, run in zip(self._processes, runs, strict=True)
            for part in divided(len(run), [arrangement.speed(d) for d in own], run.start)
        ]
        self._left = [len(run) for run in runs]  # shards of a process that are not done
        self._begun = [0] * len(runs)
        self._bucket_s: list[list[float]] = [[] for _ in runs]
        self._counts = [len(run) for run in runs]
        self.largest_part = max(self._counts) / work.shards  # of a batch, that a process loads

    def _speed_of(self, devices: range) -> float:
        return sum(self._arrangement.speed(device) for device in devices)

    def _note_sum(self) -> None:
        self.added_up_s = self._events.now_s

    def run(self) -> None:
        """Compute all shards."""
        if self._arrangement.divide == "stages":
            self._run_stages()
        elif self._arrangement.divide == "slices":
            self._run_slices()
        else:
            self._run_shards()
        self._events.run()

    # ---- by shards

    def _run_shards(self) -> None:
        for device in range(self._arrangement.devices):
            if self._runs[device]:
                self._working[self._arrangement.machine_of(device)] += 1
        for device in range(self._arrangement.devices):
            if self._runs[device]:
                self._events.at(0.0, partial(self._next, device))
        for process, count in enumerate(self._counts):
            if not count:
                self._end_process(process)

    def _next(self, device: int) -> None:
        """Let a device compute its next shard, or one that it takes from another."""
        run = self._runs[device]
        if run:
            run.popleft()
        elif not (self._arrangement.steals and self._steal(device)):
            self._working[self._arrangement.machine_of(device)] -= 1
            return
        took_s = self._shard_s(device)
        process, now_s = self._process_of[device], self._events.now_s
        self._ends_s[device] = self.free_s[device] = now_s + took_s
        self.busy_s[device] += took_s
        self._begun[process] += 1
        self._stream(process, now_s, took_s)
        self._events.at(now_s + took_s, lambda: self._end_shard(device))

    def _shard_s(self, device: int) -> float:
        """Return how long a device's next shard takes."""
        own = self._processes[self._process_of[device]]
        busy = self._working[self._arrangement.machine_of(device)]
        slowed = self._machine.slowed(busy, by_threads=len(own) > 1)
        measured_s = self._random.choice(self._work.shard_s)
        return measured_s * slowed * self._luck[device] / self._arrangement.speed(device)

    def _steal(self, thief: int) -> bool:
        """Take the last shard of the run that will end last, if the thief would be done before."""
        own = self._processes[self._process_of[thief]]
        victim, longest_s = -1, -1.0
        for device in own:
            pace_s = self._work.usual_s / self._arrangement.speed(device)
            left_s = self._ends_s[device] - self._events.now_s + pace_s * len(self._runs[device])
            if self._runs[device] and left_s > longest_s:
                victim, longest_s = device, left_s
        if victim < 0 or self._work.usual_s / self._arrangement.speed(thief) >= longest_s:
            return False
        self._runs[victim].pop()
        return True

    def _stream(self, process: int, began_s: float, took_s: float) -> None:
        """Note when the buckets of a process are written, in the shards that begin last."""
        if self._reduction is None:
            return
        count, forward = self._reduction.buckets, self._work.forward_share
        ready = self._bucket_s[process]
        if count == 1:  # one bucket is written when all is done
            new_s = [began_s + took_s]
        else:
            back_s = (1 - forward) * took_s
            new_s = [began_s + forward * took_s + back_s * (b + 1) / count for b in range(count)]
        ready[:] = [max(pair) for pair in zip(ready or new_s, new_s, strict=True)]
        if self._begun[process] == self._counts[process]:
            for bucket, ready_s in enumerate(ready):
                self._events.at(ready_s, partial(self._write, process, bucket))

    def _write(self, process: int, bucket: int) -> None:
        assert self._reduction is not None
        self._reduction.write(process, bucket)

    def _end_shard(self, device: int) -> None:
        process = self._process_of[device]
        self._left[process] -= 1
        self._next(device)
        if not self._left[process]:
            self._end_process(process)

    def _end_process(self, process: int) -> None:
        """Let a process send its report, and its buckets if it had no shard."""
        if self._reduction is None:
            return
        if not self._counts[process]:
            for bucket in range(self._reduction.buckets):
                self._reduction.write(process, bucket)
        self._reduction.report(process)

    # ---- by slices: the devices of a process compute one shard after another

    def _run_slices(self) -> None:
        for own in self._processes:
            self._working[self._arrangement.machine_of(own[0])] += len(own)
        for process in range(len(self._processes)):
            if self._counts[process]:
                self._events.at(0.0, partial(self._next_sliced, process))
            else:
                self._end_process(process)

    def _next_sliced(self, process: int) -> None:
        """Let the devices of a process compute their next shard, or end if there is none."""
        if not self._left[process]:
            self._end_process(process)
            return
        own, now_s = self._processes[process], self._events.now_s
        rest_s, sliced_s = self._sliced_s(own)
        took_s = rest_s + max(sliced_s)
        for device, busy_s in zip(own, sliced_s, strict=True):
            self.busy_s[device] += busy_s + (rest_s if device == own[0] else 0.0)
            self.free_s[device] = now_s + took_s
        self._left[process] -= 1
        self._begun[process] += 1
        self._stream(process, now_s, took_s)
        self._events.at(now_s + took_s, partial(self._next_sliced, process))

    def _sliced_s(self, own: range) -> tuple[float, list[float]]:
        """Return a shard's seconds outside of slices, and those of each device in its slices."""
        work, machine = self._work, self._machine
        measured_s = self._random.choice(work.shard_s)
        share = min(1.0, work.sliced_s / work.usual_s)
        paces = [self._luck[device] / self._arrangement.speed(device) for device in own]
        busy = self._working[self._arrangement.machine_of(own[0])]
        slowed = machine.slowed(busy, by_threads=len(own) > 1)
        counts = [len(run) for run in divided(work.slices, [1.0] * len(own))]
        sliced_s = [
            share * measured_s * count / work.slices * slowed * pace
            for count, pace in zip(counts, paces, strict=True)
        ]
        meetings_s = work.meetings * machine.meeting_s if len(own) > 1 else 0.0
        return (1 - share) * measured_s * paces[0] + meetings_s, sliced_s

    # ---- by stages: one forward, one backward

    def _run_stages(self) -> None:
        for process, devices in enumerate(self._processes):
            stages = self._arrangement.stages
            replicas = [devices[at : at + stages] for at in range(0, len(devices), stages)]
            runs = divided(self._counts[process], [1.0] * len(replicas))
            self._working[self._arrangement.machine_of(devices[0])] += len(devices)
            for replica, run in zip(replicas, runs, strict=True):
                self.pipelines.append(_Pipeline(self, process, replica, len(run)))
        for one in self.pipelines:
            one.begin()

    def end_stages(self, process: int, count: int) -> None:
        """Note that a replica has computed all its shards; then a process sends its gradients."""
        self._left[process] -= count
        if not self._left[process] and self._reduction is not None:
            for bucket in range(self._reduction.buckets):
                self._reduction.write(process, bucket)
            self._reduction.report(process)

    def visit(self, device: int, *, backward: bool, then: Callable[[float], object]) -> None:
        """Let a device compute a shard's visit to its stage."""
        share = 1 - self._work.forward_share if backward else self._work.forward_share
        took_s = share * self._shard_s(device) / self._arrangement.stages
        sent_s = 0.0
        if self._machine.has_own_memory:
            local = self._machine.local
            sent_s = local.latency_s + self._work.cut_nbytes / local.bytes_per_s
        self.busy_s[device] += took_s
        self.free_s[device] = self._events.now_s + took_s
        self._events.at(self.free_s[device], lambda: then(sent_s))

    def later(self, after_s: float, do: Callable[[], object]) -> None:
        """Let something happen after some seconds."""
        self._events.at(self._events.now_s + after_s, do)


class _Pipeline:
    """A replica of a network in stages: stage s of S holds at most S - s shards."""

    def __init__(self, step: _Step, process: int, devices: range, shards: int) -> None:
        self._step, self._process, self._devices = step, process, devices
        self._shards = shards
        count = len(devices)
        self._forward = [shards] + [0] * (count - 1)  # that a stage may compute forward now
        self._backward = [0] * count
        self._held = [0] * count
        self.most_held = [0] * count
        self._is_busy = [False] * count
        self._done = 0

    def begin(self) -> None:
        """Let the first stage begin."""
        if self._shards:
            self._step.later(0.0, lambda: self._next(0))

    def _next(self, stage: int) -> None:
        """Let a stage compute a backward pass if there is one, or else a forward pass."""
        last = len(self._devices) - 1
        if self._is_busy[stage]:
            return
        backward = self._backward[stage] > 0
        if not backward and not (
            self._forward[stage] and self._held[stage] < len(self._devices) - stage
        ):
            return
        self._is_busy[stage] = True
        if backward:
            self._backward[stage] -= 1
        else:
            self._forward[stage] -= 1
            self._held[stage] += 1
            self.most_held[stage] = max(self.most_held[stage], self._held[stage])

        def end(sent_s: float) -> None:
            self._is_busy[stage] = False
            if backward:
                self._held[stage] -= 1
            if backward and stage:
                self._step.later(sent_s, lambda: self._arrive(self._backward, stage - 1))
            elif backward:
                self._done += 1
                if self._done == self._shards:
                    self._step.end_stages(self._process, self._shards)
            elif stage < last:
                self._step.later(sent_s, lambda: self._arrive(self._forward, stage + 1))
            else:
                self._backward[stage] += 1
            self._next(stage)

        self._step.visit(self._devices[stage], backward=backward, then=end)

    def _arrive(self, waiting: list[int], stage: int) -> None:
        waiting[stage] += 1
        self._next(stage)


def divided(count: int, speeds: list[float], first: int = 0) -> list[range]:
    """Divide `count` shards into contiguous runs in proportion to speeds.

    Rounded by largest remainders, as `evenstep.batch.contiguous_runs` does.
    """
    total = sum(speeds)
    shares = [count * speed / total for speed in speeds]
    lengths = [*map(int, shares)]
    order = sorted(range(len(speeds)), key=lambda one: (lengths[one] - shares[one], one))
    for one in order[: count - sum(lengths)]:
        lengths[one] += 1
    runs = []
    for length in lengths:
        runs.append(range(first, first + length))
        first += length
    return runs
