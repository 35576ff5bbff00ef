"""Counts what a step of several processes does besides arithmetic.

torchrun --nproc-per-node 2 tests/support/jobs/counted.py OUT memory|network WIDTH
"""

import collections
import concurrent.futures
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

import evenstep
from evenstep.distributed import rendezvous
from evenstep.distributed.gloo import GlooTransport
from evenstep.distributed.machines import reduce
from evenstep.distributed.process_group import TransportRounds
from evenstep.distributed.shared.rounds import SharedRounds
from evenstep.engine import ThreadLanes

FIRST, STEPS = 20, 5  # no step is checked or compared there, as some of the first ones are
COUNTED = {
    "rounds through memory": (SharedRounds, "exchange"),
    "rounds through the network": (TransportRounds, "exchange"),
    "messages": (GlooTransport, "send"),
    "calls of lanes": (ThreadLanes, "put"),
    "calls of other threads": (concurrent.futures.ThreadPoolExecutor, "submit"),
}


def count(counts, name, owner, method):
    """Count the calls of a method."""
    called = getattr(owner, method)

    def counting(*arguments, **options):
        counts[name] += 1
        return called(*arguments, **options)

    setattr(owner, method, counting)


def main():
    """Train, and write what one step does."""
    out, way, width = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if way == "network":
        rendezvous.shared_rounds = lambda *_: None
        reduce.SharedMemoryReducer = reduce.NetworkReducer
    torch.manual_seed(0)
    model = nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    X, y, counts = torch.randn(6, width), torch.randn(6, width), collections.Counter()
    options = {"devices": 1, "shards": int(os.environ["WORLD_SIZE"])}
    with evenstep.Trainer(model, optimizer, nn.functional.mse_loss, **options) as trainer:
        for _ in range(FIRST):
            trainer.step(X, y)
        for name, (owner, method) in COUNTED.items():
            count(counts, name, owner, method)
        for _ in range(STEPS):
            trainer.step(X, y)
        found = {name: counts[name] / STEPS for name in COUNTED}
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
