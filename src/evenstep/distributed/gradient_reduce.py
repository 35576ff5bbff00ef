"""The sum of dense gradients over processes, through the network.

Gradients are exchanged bucket by bucket: a bucket that is complete can be in flight while a
backward pass still computes the others.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from evenstep.collectives import CanonicalSum, Forest, SumAtOwner, start_sum
from evenstep.distributed.flat_buffers import Bucket, FlatSpace, Gradients
from evenstep.distributed.process_group import Peers
from evenstep.errors import PeerError

BUCKET_BYTES = 4 << 20


class GradientReduction(abc.ABC):
    """The reduction of the gradients of one attempt at a step, in progress.

    Each local partial sum is written once per bucket, from any thread. Every process must end the
    reduction, by `total` or, if the step is not applied, by `drop`: the others wait for it.

    Attributes:
        buckets: the pieces that are written and exchanged separately.
        present: for each local partial sum and each parameter, whether it has a gradient (1 or 0).
    """

    def __init__(
        self, flats: FlatSpace, partials: int, parameters: int, buckets: list[Bucket]
    ) -> None:
        self.buckets = buckets
        self.present = [bytearray(parameters) for _ in range(partials)]
        self._flats = flats
        self._missing = [set(range(partials)) for _ in self.buckets]
        self._lock = threading.Lock()

    def write(
        self, bucket: int, partial: int, left: Gradients, right: Gradients | None = None
    ) -> None:
        """Write the gradients of a local partial sum, left + right, into a bucket.

        `partial` is counted among the sums of this process; `left` and `right` are as for
        `FlatSpace.write`.
        """
        self._flats.write(self._views(partial, bucket), self.buckets[bucket], left, right)
        for position, i in enumerate(self.buckets[bucket].numbers):
            absent = left[position] is None and (right is None or right[position] is None)
            self.present[partial][i] = not absent
        with self._lock:
            self._missing[bucket].discard(partial)
            is_complete = not self._missing[bucket]
        if is_complete:
            self._send(bucket)

    def write_rest(self, partials: Sequence[list[torch.Tensor | None]]) -> None:
        """Write everything that was not written yet, given all gradients of the partial sums.

        Their places in `partials` become None: a gradient that was written need not be kept.
        """
        for number, bucket in enumerate(self.buckets):
            for partial in sorted(self._missing[number]):
                own = partials[partial]
                left = [own[i] for i in bucket.numbers]
                for i in bucket.numbers:
                    own[i] = None
                self.write(number, partial, left)
                del left
            if not partials:  # a process without shards
                self._send(number)

    def gradients(self, device: torch.device) -> Iterable[tuple[int, torch.Tensor]]:
        """Return (number, sum) of the gradients that this process needs, on `device`.

        As for `total`, every process must have written all its partial sums.
        """
        return self._flats.views([total.to(device) for total in self.total()])

    @abc.abstractmethod
    def total(self) -> list[torch.Tensor]:
        """Return the sum as flat vectors in this process's own memory.

        It may be called only after every process has written all its partial sums.
        """

    @abc.abstractmethod
    def drop(self) -> None:
        """End the reduction without a sum."""

    @abc.abstractmethod
    def _views(self, partial: int, bucket: int) -> Mapping[int, torch.Tensor]:
        """Return where a local partial sum has the gradients of a bucket, and maybe others."""

    @abc.abstractmethod
    def _send(self, bucket: int) -> None:
        """Exchange a bucket that all local partial sums have written."""


class NetworkReducer:
    """Sums gradients through the network, in a thread of its own (see `canonical_sum`)."""

    def __init__(self, peers: Peers, flats: FlatSpace, bucket_bytes: int) -> None:
        self.peers = peers
        self.flats = flats
        self.bucket_bytes = bucket_bytes
        self.buckets = flats.buckets(bucket_bytes)
        # More intra-op threads would compete with the devices for the cores.
        self.thread = ThreadPoolExecutor(1, "evenstep exchange", torch.set_num_threads, (1,))

    def begin(self, trees: Forest, parameters: int, step: int) -> GradientReduction:
        """Start the reduction of a step's gradients."""
        return NetworkReduction(self, trees, parameters)

    def reserve(self, trees: Forest, since: int) -> None:
        """Do nothing: no memory is reserved."""

    def close(self) -> None:
        """End the thread."""
        self.thread.shutdown()


class NetworkReduction(GradientReduction):
    """A reduction through the network: buckets are sent at once, and added up in the thread."""

    def __init__(self, reducer: NetworkReducer, trees: Forest, parameters: int) -> None:
        partials = len(trees.partials_of(reducer.peers.rank))
        super().__init__(reducer.flats, partials, parameters, reducer.buckets)
        self._reducer = reducer
        self._trees = trees
        self._own: list[list[torch.Tensor]] = [[] for _ in range(partials)]
        self._own_views: list[Mapping[int, torch.Tensor]] = [{} for _ in range(partials)]
        self._totals: list[torch.Tensor] = []
        self._sent: set[int] = set()
        self._pieces: list[tuple[CanonicalSum | SumAtOwner, Future[None]]] = []
        self._only: CanonicalSum | None = None  # the only piece, which nothing can overlap with
        self._failure: PeerError | None = None

    def total(self) -> list[torch.Tensor]:
        """Return the sum as flat vectors."""
        self._finish()
        return self._totals or self._flats.new()

    def drop(self) -> None:
        """Send what other processes wait for, and end without a sum."""
        for bucket in sorted(set(range(len(self.buckets))) - self._sent):
            self._send(bucket)
        self._finish()

    def _finish(self) -> None:
        """Wait until all buckets were sent and added up."""
        pieces, self._pieces = self._pieces, []
        only, self._only = self._only, None
        for _, added in pieces:
            added.result()
        for piece, _ in pieces:
            piece.wait()
        if only is not None:
            only.add_up()
            only.wait()

    def _views(self, partial: int, bucket: int) -> Mapping[int, torch.Tensor]:
        with self._lock:
            if not self._own[partial]:
                self._own[partial] = self._flats.new()
                self._own_views[partial] = dict(self._flats.views(self._own[partial]))
            return self._own_views[partial]

    def _send(self, bucket: int) -> None:
        flat, lo, hi = self.buckets[bucket].flat, self.buckets[bucket].lo, self.buckets[bucket].hi
        with self._lock:
            self._sent.add(bucket)
            self._totals = self._totals or self._flats.new()
            written = [own or self._flats.new() for own in self._own]  # not, where it is dropped
        pieces = start_sum(
            self._reducer.peers.transport,
            self._trees,
            [own[flat][lo:hi] for own in written],
            self._totals[flat][lo:hi],
            bucket_bytes=self._reducer.bucket_bytes,
            tag=1 + bucket,
            name=f"bucket {bucket} of the gradients",
        )
        if len(self.buckets) == len(pieces) == 1:
            (self._only,) = pieces
            return
        # Only now, after all are sent: messages with one tag arrive in the order of sending.
        submit = self._reducer.thread.submit
        self._pieces += [(piece, submit(self._add_up, piece)) for piece in pieces]

    def _add_up(self, piece: CanonicalSum | SumAtOwner) -> None:
        """Add up a piece, unless an earlier one failed: the time limit is waited for only once."""
        if self._failure is not None:
            raise self._failure
        try:
            piece.add_up()
        except PeerError as error:
            self._failure = error
            raise
