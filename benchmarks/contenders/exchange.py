"""One way of summing a flat vector over the processes of torchrun, timed again and again.

The line: the median, over the repetitions, of the milliseconds until the slowest process was done.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import distributed

from evenstep.book.classic import CLASSIC
from evenstep.collectives import canonical_sum, forest
from evenstep.devices import kept_memory
from evenstep.distributed import Peers, join
from evenstep.distributed.flat_buffers import FlatSpace
from evenstep.distributed.gradient_reduce import (
    BUCKET_BYTES,
    SharedMemoryReducer,
    add_up_shared,
)


def main() -> None:
    """Time the way that the job names, and print the line in the first process."""
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    distributed.init_process_group(backend="gloo")
    peers = join(60.0)
    memory = nullcontext() if job["way"] == "gloo" else kept_memory()  # as a trainer keeps it
    with peers.status_board, memory:
        once = WAYS[job["way"]](peers, job["elements"])
        seconds = [timed(once) for _ in range(job["warmup"] + job["repetitions"])][job["warmup"] :]
    slowest = torch.tensor(seconds, dtype=torch.float64)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    if peers.rank == 0:
        print(json.dumps({"median_ms": 1e3 * statistics.median(slowest.tolist())}))
    distributed.destroy_process_group()


def timed(once: Callable[[], object]) -> float:
    """Return the seconds of one sum that all processes begin together."""
    distributed.barrier()
    began = time.perf_counter()
    once()
    return time.perf_counter() - began


def by_gloo(peers: Peers, elements: int) -> Callable[[], object]:
    """Torch's own all_reduce."""
    vector = torch.ones(elements)
    return lambda: distributed.all_reduce(vector)


def by_network(peers: Peers, elements: int) -> Callable[[], object]:
    """The canonical sum through the network, one partial sum each."""
    vector, out = torch.ones(elements), torch.empty(elements)
    trees = forest(peers.size, peers.size, tuple(range(r, r + 1) for r in range(peers.size)))
    return lambda: canonical_sum(peers.transport, trees, [vector], out)


def by_memory(peers: Peers, elements: int) -> Callable[[], object]:
    """The canonical sum through shared memory, from gradients that lie there to sums there."""
    flats = FlatSpace([torch.ones(elements)], [0])
    trees = forest(peers.size, peers.size, tuple(range(r, r + 1) for r in range(peers.size)))
    shared = SharedMemoryReducer(peers, flats, BUCKET_BYTES)
    shared.reserve(trees, 0)
    shared.begin(trees, 1, 0).write_rest([[torch.ones(elements)]])

    def once() -> None:
        peers.gather(b"", "the others")
        add_up_shared(peers, trees, shared.shared[-1])

    return once


def by_memory_with_copies(peers: Peers, elements: int) -> Callable[[], object]:
    """The same, from and to memory of each process's own."""
    vector = torch.ones(elements)
    flats = FlatSpace([vector], [0])
    trees = forest(peers.size, peers.size, tuple(range(r, r + 1) for r in range(peers.size)))
    shared = SharedMemoryReducer(peers, flats, BUCKET_BYTES)
    shared.reserve(trees, 0)

    def once() -> None:
        sending = shared.begin(trees, 1, 0)
        sending.write_rest([[vector]])
        peers.gather(b"", "the others")
        sending.total()

    return once


def classic(name: str) -> Callable[[Peers, int], Callable[[], object]]:
    """One of the classic algorithms."""

    def make(peers: Peers, elements: int) -> Callable[[], object]:
        vector = torch.ones(elements)
        return lambda: CLASSIC[name](peers.transport, vector)

    return make


WAYS: dict[str, Callable[[Peers, int], Callable[[], object]]] = {
    "gloo": by_gloo,
    "network": by_network,
    "memory": by_memory,
    "memory.copies": by_memory_with_copies,
    **{f"classic.{name}": classic(name) for name in CLASSIC},
}

if __name__ == "__main__":
    main()
