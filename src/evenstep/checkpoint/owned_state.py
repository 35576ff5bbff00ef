"""Optimizer state of which each process holds the part that it owns: gathered, or its fingerprint.

Every process must call these functions at the same time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from evenstep.checkpoint.codec import Encoded, Tree, decode, encode
from evenstep.checkpoint.fingerprint import pieces_of
from evenstep.devices.addresses import bytes_of
from evenstep.distributed import Exchange, Peers
from evenstep.distributed.owners.values import listed, streamed


def gathered(peers: Peers, states: Mapping[int, Tree], exchange: Exchange) -> dict[int, Tree]:
    """Return the states of all processes together, by the numbers of parameters, in order.

    `states`, those that this process holds, are part of the result.

    Raises:
        PeerError: a process is lost, or in a different call.
        CheckpointError: a state holds something that can't be sent.
    """
    own: dict[int, Encoded] = {}

    def listing() -> list[Any]:
        own.update((number, encode(state)) for number, state in sorted(states.items()))
        return [
            [number, one.plain, [_described(name, value) for name, value in one.tensors.items()]]
            for number, one in own.items()
        ]

    everyones = listed(peers, listing, exchange)
    order = [
        (rank, nbytes)
        for rank, entries in enumerate(everyones)
        for _, _, tensors in entries
        for *_, nbytes in tensors
    ]
    ours = (bytes_of(value) for one in own.values() for value in one.tensors.values())
    arriving = streamed(peers, order, ours, range(peers.size), exchange)
    found = dict(states)
    for rank, entries in enumerate(everyones):
        for number, plain, tensors in entries:
            values = {name: _restored(next(arriving), *rest) for name, *rest, _ in tensors}
            if rank != peers.rank:
                found[number] = decode(plain, values.__getitem__)
    return dict(sorted(found.items()))


def digest_over(peers: Peers, entries: Iterable[tuple[str, Any]], exchange: Exchange) -> str:
    """Return the fingerprint over the entries of all processes, as `digest_of` does of one's.

    The first process computes it, from one tensor at a time. No two processes may have entries of
    one name.
    """
    own: list[tuple[str, bytes, torch.Tensor | None]] = []

    def listing() -> list[Any]:
        for name, value in sorted(entries, key=lambda entry: entry[0]):
            own.append((name, *pieces_of(name, value)))
        return [
            [name, header.hex(), None if data is None else data.nbytes]
            for name, header, data in own
        ]

    whole = [
        (name, rank, header, nbytes)
        for rank, entries_of_one in enumerate(listed(peers, listing, exchange))
        for name, header, nbytes in entries_of_one
    ]
    whole.sort(key=lambda entry: entry[0])
    order = [(rank, nbytes) for _, rank, _, nbytes in whole if nbytes is not None]
    ours = (bytes_of(data) for _, _, data in own if data is not None)
    arriving = streamed(peers, order, ours, [0], exchange)
    digest = hashlib.sha256()
    for _, _, header, nbytes in whole:
        digest.update(bytes.fromhex(header))
        data = next(arriving) if nbytes is not None else None
        if data is not None:
            digest.update(data.numpy().data)
    return str(listed(peers, digest.hexdigest, exchange)[0])


def _described(name: str, value: torch.Tensor) -> list[Any]:
    return [name, str(value.dtype).removeprefix("torch."), list(value.shape), value.nbytes]


def _restored(data: torch.Tensor | None, dtype: str, shape: list[int]) -> torch.Tensor:
    assert data is not None
    return data.view(getattr(torch, dtype)).reshape(shape)
