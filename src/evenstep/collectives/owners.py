"""Sums that only one process needs: which process owns what, and a sum that goes to its owner."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evenstep.collectives.canonical import add_in_order, receive_terms, wait_for
from evenstep.collectives.partition import Forest
from evenstep.collectives.transport import Transfer, Transport


def assign_owners(sizes: Sequence[int], owners: int) -> list[int]:
    """Return the owner of each item: the largest first, each to the owner with the least so far.

    A pure function, so that every process gets the same answer. No owner gets more than the mean
    and one item besides; for independent items this is Graham's "longest processing time first"
    ("Bounds on Multiprocessing Timing Anomalies", 1969). Equal items are assigned in their order;
    of equally loaded owners, the first gets the item.
    """
    loads = [0] * owners
    owner_of = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        owner_of[item] = owner = loads.index(min(loads))
        loads[owner] += sizes[item]
    return owner_of


class SumAtOwner:
    """The canonical sum of a vector at the process that owns it, in progress.

    Creating it sends this process's terms, or starts to receive all others. In all, p processes of
    one partial sum each send (p - 1) n bytes for a vector of n bytes, half of what a `CanonicalSum`
    sends: nobody else gets the sum.

    `out`, of shape (n,) as the partial sums, receives the sum and may be one of them; it is None
    unless this process is the owner. `tag` and `name` are as for `CanonicalSum`.
    """

    def __init__(
        self,
        transport: Transport,
        forest: Forest,
        partials: Sequence[torch.Tensor],
        out: torch.Tensor | None,
        owner: int,
        tag: int,
        name: str,
    ) -> None:
        self._forest, self._name, self._out = forest, name, out
        self._terms: list[torch.Tensor] = []
        self._received: list[int] = []
        self._transfers: list[Transfer]
        if out is None:
            sent = [partial for partial in partials if partial.numel()]
            self._transfers = [transport.send(partial, owner, tag) for partial in sent]
        else:
            own = dict(zip(forest.partials_of(owner), partials, strict=True))
            found = receive_terms(transport, forest, own, out, tag)
            self._terms, self._received, self._transfers = found

    def add_up(self) -> None:
        """At the owner, wait for the terms of all others, and add them up.

        In other processes, wait until this one's terms were sent, and free them.

        Raises:
            PeerError: a process did not arrive in time or has left; the message has the name.
        """
        transfers, self._transfers = self._transfers, []
        wait_for(transfers, self._name)
        if self._out is not None:
            add_in_order(self._forest, self._terms, self._out, self._received)
            self._terms = []

    def wait(self) -> None:
        """Return: after `add_up`, nothing is under way."""
