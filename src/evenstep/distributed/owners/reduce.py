"""The sum of gradients where every parameter has an owner, and its new value from there to all.

Every bucket of gradients belongs to one process, its owner: all others send their partial sums to
it, and free them. After the update the owner sends the new values of its parameters to all others.
Together that is as many bytes as for gradients that everybody gets (ZeRO, stages 1 and 2:
Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC
2020, arXiv:1910.02054), but no sum is cut: a parameter is dealt whole.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait

import torch

from evenstep.collectives import Forest, SumAtOwner, Transfer, wait_all
from evenstep.distributed.gradient_reduce import GradientReduction, NetworkReducer, NetworkReduction
from evenstep.distributed.owners.space import OwnerSpace
from evenstep.distributed.process_group import Peers

_AHEAD = 2  # buckets of new values that are under way at the same time, which bounds their memory
_UNDER_WAY = 4  # buckets of gradients at the same time
_PATIENCE_S = 20.0  # the longest wait of a lane, well below the default of `lost_after_s`


class ReducerToOwners(NetworkReducer):
    """Sums gradients at their owners, through the network, in a thread of its own."""

    def __init__(self, peers: Peers, space: OwnerSpace) -> None:
        super().__init__(peers, space, bucket_bytes=0)
        self.space = space

    def begin(self, trees: Forest, parameters: int, step: int) -> GradientReduction:
        """Start the reduction of a step's gradients."""
        return _ReductionToOwners(self, trees, parameters)

    def spread(self, parameters: Sequence[torch.Tensor], changed: Sequence[bool]) -> None:
        """Give all processes the values of every owner's parameters, in place.

        Every process must call this method after the same step. `changed` says of each parameter
        whether it may have changed, the same in every process.

        Raises:
            PeerError: another process did not respond in time, or has left.
        """
        transport, space = self.peers.transport, self.space
        buckets = space.buckets()
        under_way: deque[Callable[[], None]] = deque()
        # All processes take the buckets in this order, so none waits for one that others hold back.
        for flat, (bucket, owner) in enumerate(zip(buckets, space.owners, strict=True)):
            if not any(changed[i] for i in bucket.numbers):
                continue
            if len(under_way) == _AHEAD:
                under_way.popleft()()
            tag, vector = 1 + len(buckets) + flat, space.vector(flat)
            if owner == self.peers.rank:
                own = [parameters[i].detach() for i in bucket.numbers]
                space.write(dict(space.views({flat: vector})), bucket, own)
                others = [peer for peer in range(self.peers.size) if peer != owner]
                sent = [transport.send(vector, peer, tag) for peer in others]
                under_way.append(functools.partial(wait_all, sent))
            else:
                arrival = transport.receive(vector, owner, tag)
                under_way.append(functools.partial(self._take, parameters, flat, vector, arrival))
            del vector
        for finish in under_way:
            finish()

    def _take(
        self, parameters: Sequence[torch.Tensor], flat: int, vector: torch.Tensor, arrival: Transfer
    ) -> None:
        arrival.wait()
        with torch.no_grad():
            for i, value in self.space.views({flat: vector}):
                parameters[i].copy_(value)


class _ReductionToOwners(NetworkReduction):
    def __init__(self, reducer: ReducerToOwners, trees: Forest, parameters: int) -> None:
        super().__init__(reducer, trees, parameters)
        self._space, self._peers = reducer.space, reducer.peers
        self._written = [_FreshVectors(self._space) for _ in self._own]
        self._sums: dict[int, torch.Tensor] = {}
        self._may_run_ahead = False

    def gradients(self, device: torch.device) -> Iterable[tuple[int, torch.Tensor]]:
        """Return (number, sum) of the gradients whose owner this process is, on `device`."""
        self._finish()
        sums, self._sums = self._sums, {}
        return self._space.views({flat: total.to(device) for flat, total in sums.items()})

    def _views(self, partial: int, bucket: int) -> Mapping[int, torch.Tensor]:
        return dict(self._space.views({bucket: self._written[partial][bucket]}))

    def _send(self, bucket: int) -> None:
        owner = self._space.owners[bucket]
        out = None
        with self._lock:
            self._sent.add(bucket)
            own = [vectors.pop(bucket) for vectors in self._written]
            if owner == self._peers.rank:  # the sum takes the place of a term: less memory
                out = self._sums[bucket] = own[0] if own else self._space.vector(bucket)
        name = f"bucket {bucket} of the gradients"
        piece = SumAtOwner(self._peers.transport, self._trees, own, out, owner, 1 + bucket, name)
        # Only now, after all are sent: messages with one tag arrive in the order of sending.
        added = self._reducer.thread.submit(self._add_up, piece)
        with self._lock:
            self._pieces.append((piece, added))
        self._wait_for_room()

    def _wait_for_room(self) -> None:
        """Wait while too many buckets are under way; a fast process would hold all gradients.

        This can't deadlock. A process holds back the buckets above k only when it has sent all up
        to k, so the process with the least k waits for buckets that all others have sent.
        """
        while not self._may_run_ahead:
            with self._lock:
                under_way = [added for _, added in self._pieces if not added.done()]
                is_in_order = len(self._sent) == 1 + max(self._sent)
            if len(under_way) <= _UNDER_WAY or not is_in_order:
                return
            self._may_run_ahead = not wait(under_way[:1], timeout=_PATIENCE_S).done


class _FreshVectors(dict[int, torch.Tensor]):
    """The vectors of a partial sum by their numbers, allocated when they are first used."""

    def __init__(self, space: OwnerSpace) -> None:
        super().__init__()
        self._space = space

    def __missing__(self, flat: int) -> torch.Tensor:
        vector = self[flat] = self._space.vector(flat)
        return vector

    def pop(self, flat: int, *default: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return a vector, which this object forgets; a fresh one if it was never used."""
        vector = self[flat]
        del self[flat]
        return vector
