"""The sum of dense gradients over processes where they lie: on accelerators, through no CPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping

import torch

from evenstep.collectives import Forest, ranked_sum
from evenstep.devices import accelerator
from evenstep.distributed.accelerators.backend import BackendCollectives
from evenstep.distributed.flat_buffers import FlatSpace
from evenstep.distributed.gradient_reduce import GradientReduction, NetworkReducer
from evenstep.distributed.process_group import Exchange, Peers
from evenstep.engine import streams
from evenstep.errors import PeerError


class BackendReducer(NetworkReducer):
    """Sums gradients by collectives between accelerators, on a stream of their own."""

    def __init__(
        self, peers: Peers, flats: FlatSpace, bucket_bytes: int, collectives: BackendCollectives
    ) -> None:
        super().__init__(peers, flats, bucket_bytes)
        self.collectives = collectives

    def begin(self, trees: Forest, parameters: int, step: int) -> GradientReduction:
        """Start the reduction of a step's gradients."""
        return _BackendReduction(self, trees, parameters)


class _BackendReduction(GradientReduction):
    """A reduction by collectives, bucket by bucket in one order, which all processes have.

    A bucket that is written is exchanged when those before it are: collectives that processes call
    in different orders would wait for each other.
    """

    def __init__(self, reducer: BackendReducer, trees: Forest, parameters: int) -> None:
        self._own_numbers = trees.partials_of(reducer.peers.rank)
        super().__init__(reducer.flats, len(self._own_numbers), parameters, reducer.buckets)
        self._reducer, self._trees = reducer, trees
        self._peers, self._collectives = reducer.peers, reducer.collectives
        self._own: list[list[torch.Tensor]] = []
        self._own_views: list[Mapping[int, torch.Tensor]] = []
        self._totals: list[torch.Tensor] = []
        self._written: set[int] = set()
        self._exchanged = 0  # buckets

    def total(self) -> list[torch.Tensor]:
        """Return the sum as flat vectors on the accelerator, when their kernels have ended.

        Raises:
            PeerError: another process is lost, or the exchange takes too long.
        """
        assert self._exchanged == len(self.buckets)
        self._allocate()
        device = self._collectives.device
        with accelerator.queued_on(self._collectives.stream):
            fence = accelerator.fence_here(device)
        limit_s = self._peers.timeout_s
        late_s = time.perf_counter() + limit_s
        if not streams.finish([fence], lambda: time.perf_counter() > late_s):
            self._peers.gather(b"", Exchange("step", "the end of the exchange of gradients"))
            raise PeerError(
                f"the exchange of gradients by {self._collectives.name} did not end within "
                f"{limit_s:g} s, though all processes respond"
            )
        return self._totals

    def drop(self) -> None:
        """Take part in what other processes wait for, and end without a sum."""
        with accelerator.ignoring_failed(self._collectives.device):
            self._exchange_up_to(len(self.buckets))

    def _allocate(self) -> None:
        """Allocate all vectors on the calling thread's stream; the exchange's stream uses them."""
        if not self._totals:
            device = self._collectives.device
            self._own = [self._flats.new(device) for _ in self._own_numbers]
            self._own_views = [dict(self._flats.views(one)) for one in self._own]
            self._totals = self._flats.new(device)
            with accelerator.queued_on(self._collectives.stream):
                for vector in itertools.chain(self._totals, *self._own):
                    accelerator.keep(vector)

    def _views(self, partial: int, bucket: int) -> Mapping[int, torch.Tensor]:
        with self._lock:
            self._allocate()
            return self._own_views[partial]

    def _send(self, bucket: int) -> None:
        with self._lock:
            self._written.add(bucket)
            ready = self._exchanged
            while ready in self._written:
                ready += 1
            self._exchange_up_to(ready)

    def _exchange_up_to(self, end: int) -> None:
        if self._exchanged == end:
            return
        self._allocate()
        with accelerator.queued_on(self._collectives.stream):
            while self._exchanged < end:
                bucket = self.buckets[self._exchanged]
                self._exchanged += 1  # also if it fails: the others count it, too
                own, total = (
                    [vectors[bucket.flat][bucket.lo : bucket.hi] for vectors in given]
                    for given in (self._own, [self._totals])
                )
                ranked_sum(self._collectives, self._trees, own, *total)
