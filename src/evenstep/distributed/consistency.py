"""Checks that all processes of a job train the same thing and are in the same state."""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Mapping

from evenstep.distributed.process_group import Exchange, Peers
from evenstep.errors import DivergedError, InputError


def agree(peers: Peers, facts: Mapping[str, object], what: str, call: str) -> None:
    """Compare facts over all processes, each of which must call this function.

    Args:
        peers: the processes.
        facts: values that JSON can hold, by name.
        what: what the facts are about, for error messages.
        call: the trainer's method that compares them.

    Raises:
        InputError: some facts differ; the message names each of them and the process.
    """
    message = json.dumps(dict(facts)).encode()
    exchange = Exchange(call, f"{what} to compare")
    reported = [json.loads(other) for other in peers.gather(message, exchange)]
    first = reported[0]
    different = [
        f"{name} is {other.get(name)} on rank {rank} ({peers.hosts[rank]}), but "
        f"{first.get(name)} on rank 0 ({peers.hosts[0]})"
        for rank, other in enumerate(reported)
        for name in first
        if other.get(name) != first[name]
    ]
    if different:
        raise InputError(f"the processes disagree about {what}: {'; '.join(different)}")


def refuse_divergence(peers: Peers, digests: Mapping[str, str], step: int) -> None:
    """Compare the training state over all processes, each of which must call this function.

    Args:
        peers: the processes.
        digests: the digest of every tensor, by name.
        step: the number of steps that were done when the state was taken.

    Raises:
        DivergedError: a process has another state than most (of two, than rank 0); the message
            names the process and the first tensor that differs.
    """
    whole = hashlib.sha256(json.dumps(sorted(digests.items())).encode()).digest()
    states = peers.gather(whole, Exchange("step", "its state before the update", step))
    if len(set(states)) == 1:
        return
    (usual, _), *_ = collections.Counter(states).most_common(1)
    rank = next(rank for rank, state in enumerate(states) if state != usual)
    message = json.dumps(dict(digests)).encode()
    named = peers.gather(message, Exchange("step", "the digests of its tensors", step))
    theirs, ours = json.loads(named[rank]), json.loads(named[states.index(usual)])
    names = sorted(theirs.keys() | ours.keys())
    first = next(name for name in names if theirs.get(name) != ours.get(name))
    raise DivergedError(
        f"rank {rank} (on {peers.hosts[rank]}) is in another state than the others after step "
        f"{step}: the first tensor that differs is {first}. Its memory or processor may be faulty, "
        f"or its script changes the model: resume from the last checkpoint without it",
        rank,
    )
