"""Traces made by hand, written by the real `Trace`."""

from evenstep.profiling.reader import account_of_trace
from evenstep.profiling.trace import Span, Trace

MS = 1e-3


class HandTrace:
    """Steps of which every duration is said, in milliseconds, one after the other.

    Args:
        devices: their names.
        limit: how many spans the trace has room for.
    """

    def __init__(self, *devices, limit=200_000):
        self.devices = devices
        self.trace = Trace([*devices, *(f"copy {name}" for name in devices)], limit=limit)
        self.now = 0.0
        self.step = 0

    def span(self, row, name, category, began, took, **story):
        row = self.devices.index(row) if row in self.devices else row
        self.trace.add(Span(row, name, category, began * MS, (began + took) * MS, story or None))

    def pause(self, took):
        """Nothing of a step happens, such as in a test or while saving."""
        self.now += took

    def load(self, took, *, at=None):
        self.span("front end", "load", "load", self.now if at is None else at, took)

    def add(self, *shards, wait=0.0, sums=(), update=1.0, home=None, idle=0.0):
        """Add a step.

        Args:
            shards: for each device how long each of its shards takes; (took, "stolen") is stolen.
            wait: how long data are waited for.
            sums: for each device how long it sums at the end of its last shard.
            update: how long the update takes, after all shards.
            home: the devices that update; the first one if None.
            idle: how long nothing happens before the update.
        """
        if wait:
            self.span("steps", "waiting for data", "wait", self.now, wait)
        began = ends = self.now + wait
        number = 0
        for lane, takes in enumerate(shards):
            now = began
            for took in takes:
                took, stolen = took if isinstance(took, tuple) else (took, False)
                story = {"step": self.step, "shard": number} | ({"stolen": True} if stolen else {})
                self.span(self.devices[lane], f"shard {number}", "compute", now, took, **story)
                now += took
                number += 1
            if lane < len(sums):
                self.span(self.devices[lane], "sum [0,2)", "sum", now - sums[lane], sums[lane])
            ends = max(ends, now)
        ends += idle
        for device in home or self.devices[:1]:
            self.span(device, "update", "update", ends, update, step=self.step)
        ends += update
        self.span("steps", f"step {self.step}", "step", began, ends - began, step=self.step)
        self.now = ends
        self.step += 1
        return self

    def add_staged(self, shards, *stages):
        """Add a step without any overlap, of a network with a stage on each device.

        Args:
            shards: the number of shards.
            stages: for each stage how long a shard takes there, forward and backward.
        """
        began = self.now
        ways = [(stage, False) for stage in range(len(stages))]
        for shard in range(shards):
            for stage, backward in [*ways, *((stage, True) for stage, _ in reversed(ways))]:
                took = stages[stage][backward]
                story = {"step": self.step, "shard": shard, "stage": stage, "backward": backward}
                self.span(self.devices[stage], "shard", "compute", self.now, took, **story)
                self.now += took
        self.span("steps", f"step {self.step}", "step", began, self.now - began, step=self.step)
        self.step += 1
        return self

    @property
    def account(self):
        return account_of_trace(self.trace.to_json())
