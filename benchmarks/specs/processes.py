"""Two processes on one machine: the exchange of ResNet-18's gradients, and training against DDP."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import distributed

from benchmark import TRAINING_STEPS, Benchmark, Contender, script
from evenstep.bench import lineup, paired_ratios
from evenstep.bench.rounds import Run, by_round
from evenstep.bench.tables import Table, cells, median, verdict
from evenstep.book.classic import CLASSIC
from evenstep.collectives import canonical_sum, forest
from evenstep.devices import kept_memory
from evenstep.distributed import Exchange, Peers, join
from evenstep.distributed.flat_buffers import FlatSpace
from evenstep.distributed.gradient_reduce import BUCKET_BYTES
from evenstep.distributed.shared import reduce

EVERYONE = Exchange("step", "the others")
ELEMENTS = 11_173_962  # parameters of ResNet-18 with one channel and ten classes: 44.7 MB
EXCHANGE = {"elements": ELEMENTS, "warmup": 3, "repetitions": 15}
METHODS: dict[str, tuple[str, float | None]] = {
    "gloo": ("gloo's all_reduce", None),
    "network": ("canonical sum, network", 0.8),
    "memory": ("canonical sum, shared memory, in place", 0.3),
    "memory.copies": ("canonical sum, shared memory, from and to own memory", None),
    "classic.root": ("to a root and back", None),
    "classic.tree": ("by a tree", None),
    "classic.ring": ("around a ring", None),
    "classic.sharded": ("sharded", None),
}
"""Methods to sum: label, and target (milliseconds over those of gloo's all_reduce)."""

BATCHES = {"lenet": 256, "resnet18": 128}
OVER_DDP = {"lenet": 1.0, "resnet18": 0.97}
"""Targets for the speed over that of DDP as its documentation shows it."""


def measure(job: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the median milliseconds until the slowest process is done, in the first process."""
    torch.set_num_threads(1)
    distributed.init_process_group(backend="gloo")
    peers, times_s = join(60.0), []
    gloo = job["method"] == "gloo"
    memory = contextlib.nullcontext() if gloo else kept_memory()  # as a trainer keeps it
    with peers.status_board, memory:
        once = prepared(job["method"], peers, torch.ones(job["elements"]))
        for _ in range(job["warmup"] + job["repetitions"]):
            distributed.barrier()
            began_s = time.perf_counter()
            once()
            times_s.append(time.perf_counter() - began_s)
    slowest = torch.tensor(times_s[job["warmup"] :], dtype=torch.float64)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    distributed.destroy_process_group()
    return {"median_ms": 1e3 * statistics.median(slowest.tolist())} if peers.rank == 0 else None


def prepared(method: str, peers: Peers, vector: torch.Tensor) -> Callable[[], object]:
    """Return what sums the vectors of all processes once."""
    kind, _, how = method.partition(".")
    if kind == "gloo":
        return functools.partial(distributed.all_reduce, vector)
    if kind == "classic":
        return functools.partial(CLASSIC[how], peers.transport, vector)
    trees = forest(peers.size, peers.size, tuple(range(r, r + 1) for r in range(peers.size)))
    if kind == "network":
        out = torch.empty_like(vector)
        return functools.partial(canonical_sum, peers.transport, trees, [vector], out)
    shared = reduce.SharedMemoryReducer(peers, FlatSpace([vector], [0]), BUCKET_BYTES)
    shared.reserve(trees, 0)

    def with_copies() -> None:
        sending = shared.begin(trees, 1, 0)
        sending.write_rest([[vector]])
        peers.gather(b"", EVERYONE)
        sending.total()

    def in_place() -> None:
        peers.gather(b"", EVERYONE)
        reduce.add_up_shared(peers, trees, shared.shared[-1])

    if how == "copies":
        return with_copies
    shared.begin(trees, 1, 0).write_rest([[vector]])
    return in_place


def trainings(network: str) -> list[Contender]:
    """Return evenstep, DDP, and DDP with channels-last images, each in two processes."""
    job = {"network": network, "examples": BATCHES[network], **TRAINING_STEPS[network]}
    found = {
        f"{network}.evenstep": lineup.processes(job, 2),
        f"{network}.ddp": lineup.ddp(job, 2),
        f"{network}.ddp.channels_last": lineup.ddp(job, 2, "channels_last"),
    }
    return [dataclasses.replace(one, key=key, names={"variant": key}) for key, one in found.items()]


def exchange_row(runs: list[Run], method: str) -> list[str]:
    """Return the row of a method to sum."""
    label, at_most = METHODS[method]
    own = by_round(runs, "median_ms", variant=f"exchange.{method}")
    ratios = paired_ratios(own, by_round(runs, "median_ms", variant="exchange.gloo"))
    return [label, *cells(own.values()), median(ratios), *verdict(ratios, at_most=at_most)]


def training_row(runs: list[Run], network: str, rival: str) -> list[str]:
    """Return the row of training against DDP."""
    own = by_round(runs, "examples_per_s", variant=f"{network}.evenstep")
    ratios = paired_ratios(own, by_round(runs, "examples_per_s", variant=f"{network}.{rival}"))
    at_least = OVER_DDP[network] if rival == "ddp" else None
    judged = verdict(ratios, at_least=at_least, spell="{}×".format)
    return [network, rival, median(own.values()), *cells(ratios, unit="×"), *judged]


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of the exchange and that of training."""
    runs, rivals = document["runs"], ("ddp", "ddp.channels_last")
    sums = [exchange_row(runs, method) for method in METHODS]
    races = [training_row(runs, network, rival) for network in BATCHES for rival in rivals]
    head = ("the sum", "ms", "spread", "over gloo's all_reduce", "target", "verdict")
    heads = ("network", "over", "evenstep, examples/s", "ratio", "spread", "target", "verdict")
    return {"exchange": Table(head, sums), "training": Table(heads, races, 2)}


def exchange(method: str) -> Contender:
    """Return a method to sum, in two processes."""
    more = {"launcher": lineup.torchrun(2), "threads": 1}
    return script("processes", f"exchange.{method}", {"method": method, **EXCHANGE}, **more)


BENCHMARK = Benchmark(
    name="processes",
    settings={"exchange": EXCHANGE, "batch": BATCHES},
    contenders=[*map(exchange, METHODS), *(one for name in BATCHES for one in trainings(name))],
    tables=tables,
)
