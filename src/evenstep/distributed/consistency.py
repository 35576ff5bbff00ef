"""Whether all processes of a job train the same thing, and are in the same state."""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Mapping

from evenstep.distributed.process_group import Peers
from evenstep.errors import DivergedError, InputError


def agree(peers: Peers, facts: Mapping[str, object], what: str) -> None:
    """Compare facts over all processes, each of which must call this.

    Args:
        peers: the processes.
        facts: name to something that JSON can hold.
        what: the facts are about, for errors.

    Raises:
        InputError: they differ; all that do, and where, are named.
    """
    message = json.dumps(dict(facts)).encode()
    told = [json.loads(other) for other in peers.gather(message, f"{what} to compare")]
    first = told[0]
    different = [
        f"{name} is {other.get(name)} on rank {rank} ({peers.hosts[rank]}), but "
        f"{first.get(name)} on rank 0 ({peers.hosts[0]})"
        for rank, other in enumerate(told)
        for name in first
        if other.get(name) != first[name]
    ]
    if different:
        raise InputError(f"the processes disagree about {what}: {'; '.join(different)}")


def refuse_divergence(peers: Peers, digests: Mapping[str, str], when: str) -> None:
    """Compare the digests of a state over all processes, each of which must call this.

    Args:
        peers: the processes.
        digests: of every tensor, by name.
        when: the state is from.

    Raises:
        DivergedError: who is in another state than most (of two, than rank 0), and the first
            tensor that differs there.
    """
    whole = hashlib.sha256(json.dumps(sorted(digests.items())).encode()).digest()
    told = peers.gather(whole, f"its state {when}")
    if len(set(told)) == 1:
        return
    (usual, _), *_ = collections.Counter(told).most_common(1)
    rank = next(rank for rank, other in enumerate(told) if other != usual)
    named = peers.gather(json.dumps(dict(digests)).encode(), "the digests of its tensors")
    theirs, ours = json.loads(named[rank]), json.loads(named[told.index(usual)])
    names = sorted(theirs.keys() | ours.keys())
    first = next(name for name in names if theirs.get(name) != ours.get(name))
    raise DivergedError(
        f"rank {rank} (on {peers.hosts[rank]}) is in another state than the others {when}: the "
        f"first tensor that differs is {first}. Its memory or processor may be at fault, or its "
        f"script changes the model: go on from the last checkpoint without it",
        rank,
    )
