"""Trains a small model in one of many processes, and writes what the process holds.

    launched(16, "crowd.py", OUT, V, STEPS, WIDTH)

OUT is a folder for each rank's figures: seconds, counts of what the system keeps for it, and the
bytes on this machine's cable `eth0`, if it has one.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import evenstep
from evenstep.distributed.gloo import GlooTransport

SENT = {"messages": 0, "bytes": 0}


def counted(send):
    """Return `send` of a transport, counted."""

    def sending(transport, tensor, *more):
        SENT["messages"] += 1
        SENT["bytes"] += tensor.nbytes
        return send(transport, tensor, *more)

    return sending


def held():
    """Return what this process holds: sockets to others, files in shared memory, and the rest."""
    found = {"sockets": 0, "memory_files": 0, "files": 0}
    for number in os.listdir("/proc/self/fd"):
        try:
            place = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue  # the list itself
        found["files"] += 1
        found["memory_files"] += place.startswith("/memfd:")
        found["sockets"] += place.startswith("socket:")
    sizes = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in sizes}
    mappings = Path("/proc/self/maps").read_text().splitlines()
    found["memory_maps"] = sum("/memfd:evenstep" in line for line in mappings)
    found["threads"] = len(os.listdir("/proc/self/task"))
    found["own_MiB"] = (kib["Private_Dirty"] + kib["Private_Clean"]) >> 10
    found["share_MiB"] = kib["Pss"] >> 10
    return found


def everybody_at(place):
    """Wait until all processes are here."""
    if "RANK" in os.environ:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store.set(f"{place}/{os.environ['RANK']}", "")
        store.wait([f"{place}/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))])


def on_the_cable(place):
    """Return how many bytes this machine has sent and received; zeros without a cable."""
    everybody_at(place)
    counts = [Path(f"/sys/class/net/eth0/statistics/{way}_bytes") for way in ("tx", "rx")]
    return [int(one.read_text()) if one.exists() else 0 for one in counts]


def main(out, shards, steps, width=64):
    began_s = time.perf_counter()
    GlooTransport.send = counted(GlooTransport.send)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss, parts = nn.CrossEntropyLoss(), {"shards": shards, "devices": ["cpu:0"]}
    X = torch.randn(4 * shards, 64, generator=torch.Generator().manual_seed(1))
    y = torch.arange(len(X)) % 10
    with evenstep.Trainer(model, optimizer, loss, **parts) as trainer:
        opened_at_s, opened_s = time.time(), time.perf_counter()
        trainer.step(X, y)
        trainer.waitall()
        taken_s = time.perf_counter() - opened_s
        opening, before = dict(SENT), on_the_cable("first step")
        first_s = time.perf_counter()
        for _ in range(steps):
            trainer.step(X, y)
        trainer.waitall()
        ended_s = time.perf_counter()
        figures = {
            "opened_at_s": opened_at_s,
            "open_s": opened_s - began_s,
            "first_step_s": taken_s,
            "step_ms": 1e3 * (ended_s - first_s) / steps,
            "opening": opening,
            "a_step": {kind: (SENT[kind] - opening[kind]) / steps for kind in SENT},
            "cable": [
                (now - then) / steps
                for now, then in zip(on_the_cable("last step"), before, strict=True)
            ],
            "gradient_bytes": sum(parameter.nbytes for parameter in model.parameters()),
            **held(),
            "fingerprint": trainer.fingerprint(),
        }
    rank = os.environ.get("RANK", "0")
    Path(out, f"{rank}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
