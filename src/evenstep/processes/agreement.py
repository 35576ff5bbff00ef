"""Whether all processes of a job train the same thing."""

from __future__ import annotations

import json
from collections.abc import Mapping

from evenstep.errors import InputError
from evenstep.processes.peers import Peers


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
