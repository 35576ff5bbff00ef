"""How processes add up gradients in a simulated step, and what the update costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from evenstep.planning.described import BUCKET_NBYTES, Arrangement, Machine, Work
from evenstep.planning.events import Events, Gathering, Wire
from evenstep.planning.formulas import ring_nbytes

_SMALL_NBYTES = 64 << 10  # a piece of which all processes get everything at once
_COPIES = 2  # in shared memory: the addition of a chunk, and a copy of the sum
_ASKING = 1  # more latencies of a message: gloo asks whether it may send
_MOST_PIECES = 4096  # buckets of all processes
_SHARDED_PASSES = 1.5  # parameters gathered twice and gradients scattered once, over an all-reduce


class Reduction:
    """The sum of a step's gradients over processes.

    Args:
        events: the clock.
        done: is called when all processes have the sum, and the new values if owners update.
        partials: how many partial sums each process sends.
    """

    def __init__(
        self,
        events: Events,
        work: Work,
        machine: Machine,
        arrangement: Arrangement,
        partials: Sequence[int],
        done: Callable[[], object],
    ) -> None:
        self._events, self._work, self._machine = events, work, machine
        self._arrangement, self._partials = arrangement, partials
        self._processes = arrangement.processes
        count = len(self._processes)
        self.in_memory = (
            arrangement.machines == 1
            and not (arrangement.sockets or machine.has_own_memory)
            and (arrangement.divide, arrangement.exchange) != ("owners", "canonical")
            and arrangement.exchange == "canonical"
        )
        buckets = max(1, math.ceil(work.gradient_nbytes / BUCKET_NBYTES))
        self.buckets = min(buckets, max(2, _MOST_PIECES // count))  # coarser with many processes
        self._nbytes = work.gradient_nbytes / self.buckets
        self._messages = math.ceil(buckets / self.buckets)  # that one stands for
        network, local = machine.network, machine.local
        machines = range(1 if network.shared else arrangement.machines)
        self._network = [Wire(network) for _ in machines] * (
            arrangement.machines if network.shared else 1
        )
        self._local = [Wire(local) for _ in self._processes]
        self._of_machine = [arrangement.machine_of(own[0]) for own in self._processes]
        alike = [self._of_machine.count(one) for one in range(arrangement.machines)]
        self._beside = [alike[one] for one in self._of_machine]  # processes of the same machine
        # Everything has to be there: the buckets' sums, and each process's report.
        self._all = Gathering(self.buckets + 1, self._update if self._is_owned else done)
        self._done = done
        self._reports = Gathering(count, self._all.arrive)
        self._written = [Gathering(count, partial(self._add, b)) for b in range(self.buckets)]
        self._scattered = [Gathering(count, partial(self._add_up, b)) for b in range(self.buckets)]
        self._ring_free_s = 0.0

    @property
    def _is_owned(self) -> bool:
        return self._arrangement.divide == "owners"

    def write(self, process: int, bucket: int) -> None:
        """Let a process have a bucket of its own shards' gradients."""
        if self._arrangement.exchange != "canonical" or self.in_memory:
            self._written[bucket].arrive()
            return
        share = self._partials[process] * self._nbytes
        self._send(process, share, self._scattered[bucket].arrive)

    def report(self, process: int) -> None:
        """Let a process send its report, when all its shards are done."""
        if self.in_memory:
            self._events.at(self._events.now_s + self._machine.shared_s, self._reports.arrive)
        else:
            self._send(process, 0, self._reports.arrive)

    def _send(self, process: int, nbytes: float, then: Callable[[], object]) -> None:
        """Send a process's part of `nbytes` to each other process."""
        now_s, count = self._events.now_s, len(self._processes)
        messages = self._messages if nbytes else 1
        near, far = self._beside[process] - 1, count - self._beside[process]
        arrives_s = now_s
        if near:
            asked_s = now_s + _ASKING * self._machine.local.latency_s
            arrives_s = self._local[process].send(asked_s, nbytes * near / count, near * messages)
        if far:
            wire = self._network[self._of_machine[process]]
            asked_s = now_s + _ASKING * self._machine.network.latency_s
            arrives_s = max(arrives_s, wire.send(asked_s, nbytes * far / count, far * messages))
        self._events.at(arrives_s, then)

    def _add(self, bucket: int) -> None:
        """Add up a bucket that all processes have written."""
        if self.in_memory:
            copied = self._nbytes * _COPIES * (1 if self.buckets > 1 else 1.5)
            took_s = copied / self._machine.copied_bytes_per_s
        else:
            took_s = self._ring_s()
        self._ring_free_s = max(self._events.now_s, self._ring_free_s) + took_s
        self._events.at(self._ring_free_s, self._all.arrive)

    def _ring_s(self) -> float:
        """Return the seconds of a ring all-reduce of a bucket: one ring through all devices."""
        machine, arrangement = self._machine, self._arrangement
        devices, machines = arrangement.devices, arrangement.machines
        links = [machine.local] * (arrangement.per_machine > 1) + [machine.network] * (machines > 1)
        slowest = min((link.bytes_per_s for link in links), default=math.inf)
        inside = min(arrangement.per_machine, devices)
        latency_s = 2 * (inside - 1) * machine.local.latency_s
        latency_s += 2 * (machines - 1) * machine.network.latency_s
        passes = _SHARDED_PASSES if arrangement.exchange == "sharded" else 1
        return passes * ring_nbytes(self._nbytes, devices) / slowest + latency_s

    def _add_up(self, bucket: int) -> None:
        """Let the owners of a bucket's chunks add them up, and send the sums."""
        if self._is_owned:
            self._all.arrive()
            return
        count, terms = len(self._processes), sum(self._partials)
        is_small = self._nbytes * (count - 1) <= _SMALL_NBYTES
        added = self._nbytes * (terms if is_small else terms / count)
        ended_s = self._events.now_s + added / self._machine.copied_bytes_per_s
        if is_small:
            self._events.at(ended_s, self._all.arrive)
            return
        gathered = Gathering(count, self._all.arrive)
        for process in range(count):
            self._events.at(ended_s, partial(self._send, process, self._nbytes, gathered.arrive))

    def _update(self) -> None:
        """Let each owner update its parameters and send their new values."""
        count = len(self._processes)
        updated_s = self._events.now_s + self._work.update_s / count
        sent = Gathering(count, self._done)
        for process in range(count):
            self._events.at(
                updated_s,
                partial(self._send, process, float(self._work.gradient_nbytes), sent.arrive),
            )
