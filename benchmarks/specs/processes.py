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

from benchmark import TRAINING_STEPS, Benchmark, script
from evenstep.bench import Contender, fresh, lineup, paired_ratios
from evenstep.bench.rounds import Run, by_round
from evenstep.bench.tables import Table, cells, verdict
from evenstep.book.classic import CLASSIC
from evenstep.collectives import canonical_sum, forest
from evenstep.devices import kept_memory
from evenstep.distributed import Peers, gradient_reduce, join
from evenstep.distributed.flat_buffers import FlatSpace


def measure(job: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the median milliseconds until the slowest process is done, in the first process."""
    torch.set_num_threads(1)
    distributed.init_process_group(backend="gloo")
    peers = join(60.0)
    gloo = job["method"] == "gloo"
    memory = contextlib.nullcontext() if gloo else kept_memory()  # as a trainer keeps it
    with peers.status_board, memory:
        _, _, prepare = METHODS[job["method"]]
        once = prepare(peers, job["elements"])
        times = [timed(once) for _ in range(job["warmup"] + job["repetitions"])]
    slowest = torch.tensor(times[job["warmup"] :], dtype=torch.float64)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    distributed.destroy_process_group()
    return {"median_ms": 1e3 * statistics.median(slowest.tolist())} if peers.rank == 0 else None


def timed(once: Callable[[], object]) -> float:
    """Return the seconds of one sum that all processes begin together."""
    distributed.barrier()
    began = time.perf_counter()
    once()
    return time.perf_counter() - began


def _gloo(peers: Peers, elements: int) -> Callable[[], object]:
    return functools.partial(distributed.all_reduce, torch.ones(elements))


def _network(peers: Peers, elements: int) -> Callable[[], object]:
    trees, out = _one_partial_sum_each(peers), torch.empty(elements)
    return functools.partial(canonical_sum, peers.transport, trees, [torch.ones(elements)], out)


def _memory(peers: Peers, elements: int, *, in_place: bool) -> Callable[[], object]:
    vector, trees = torch.ones(elements), _one_partial_sum_each(peers)
    flats, nbytes = FlatSpace([vector], [0]), gradient_reduce.BUCKET_BYTES
    shared = gradient_reduce.SharedMemoryReducer(peers, flats, nbytes)
    shared.reserve(trees, 0)

    def with_copies() -> None:
        sending = shared.begin(trees, 1, 0)
        sending.write_rest([[vector]])
        peers.gather(b"", "the others")
        sending.total()

    def without_copies() -> None:
        peers.gather(b"", "the others")
        gradient_reduce.add_up_shared(peers, trees, shared.shared[-1])

    if in_place:
        shared.begin(trees, 1, 0).write_rest([[vector]])
    return without_copies if in_place else with_copies


def _classic(name: str, peers: Peers, elements: int) -> Callable[[], object]:
    return functools.partial(CLASSIC[name], peers.transport, torch.ones(elements))


def _one_partial_sum_each(peers: Peers) -> Any:
    return forest(peers.size, peers.size, tuple(range(r, r + 1) for r in range(peers.size)))


ELEMENTS = 11_173_962  # parameters of ResNet-18 with one channel and ten classes: 44.7 MB
EXCHANGE = {"elements": ELEMENTS, "warmup": 3, "repetitions": 15}
METHODS: dict[str, tuple[str, float | None, Callable[[Peers, int], Callable[[], object]]]] = {
    "gloo": ("gloo's all_reduce", None, _gloo),
    "network": ("canonical sum, network", 0.8, _network),
    "memory": (
        "canonical sum, shared memory, in place",
        0.3,
        functools.partial(_memory, in_place=True),
    ),
    "memory.copies": (
        "canonical sum, shared memory, from and to own memory",
        None,
        functools.partial(_memory, in_place=False),
    ),
    "classic.root": ("to a root and back", None, functools.partial(_classic, "root")),
    "classic.tree": ("by a tree", None, functools.partial(_classic, "tree")),
    "classic.ring": ("around a ring", None, functools.partial(_classic, "ring")),
    "classic.sharded": ("sharded", None, functools.partial(_classic, "sharded")),
}
"""Methods to sum: label, target (milliseconds over those of gloo's all_reduce), preparation."""

BATCHES = {"lenet": 256, "resnet18": 128}
OVER_DDP = {"lenet": 1.0, "resnet18": 0.97}
"""Targets for the speed over that of DDP as its documentation shows it."""


def trainings(network: str) -> list[Contender]:
    """Return evenstep, DDP, and DDP with evenstep's memory format, each in two processes."""
    job = {"network": network, "examples": BATCHES[network], **TRAINING_STEPS[network]}
    found = {
        f"{network}.evenstep": lineup.processes(job, 2),
        f"{network}.ddp": lineup.ddp(job, 2),
        f"{network}.ddp.channels_last": lineup.ddp(job, 2, "channels_last"),
    }
    return [dataclasses.replace(one, key=key, names={"variant": key}) for key, one in found.items()]


def exchange_row(runs: list[Run], method: str) -> list[str]:
    """Return the row of a method to sum."""
    label, at_most, _ = METHODS[method]
    own = by_round(runs, "median_ms", variant=f"exchange.{method}")
    ratios = paired_ratios(own, by_round(runs, "median_ms", variant="exchange.gloo"))
    return [label, *cells(own.values()), cells(ratios)[0], *verdict(ratios, at_most=at_most)]


def training_row(runs: list[Run], network: str, rival: str) -> list[str]:
    """Return the row of training against DDP."""
    own = by_round(runs, "examples_per_s", variant=f"{network}.evenstep")
    ratios = paired_ratios(own, by_round(runs, "examples_per_s", variant=f"{network}.{rival}"))
    at_least = OVER_DDP[network] if rival == "ddp" else None
    judged = verdict(ratios, at_least=at_least, spell="{}×".format)
    return [network, rival, cells(own.values())[0], *cells(ratios, unit="×"), *judged]


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of the exchange and that of training."""
    runs = document["runs"]
    return {
        "exchange": Table(
            ("the sum", "ms", "spread", "over gloo's all_reduce", "target", "verdict"),
            [exchange_row(runs, method) for method in METHODS],
        ),
        "training": Table(
            ("network", "over", "evenstep, examples/s", "ratio", "spread", "target", "verdict"),
            [
                training_row(runs, network, rival)
                for network in BATCHES
                for rival in ("ddp", "ddp.channels_last")
            ],
            2,
        ),
    }


BENCHMARK = Benchmark(
    name="processes",
    settings={"exchange": EXCHANGE, "batch": BATCHES},
    contenders=[
        *(
            script(
                "processes",
                f"exchange.{method}",
                {"method": method, **EXCHANGE},
                launcher=lineup.torchrun(2),
                threads=1,
            )
            for method in METHODS
        ),
        *(one for network in BATCHES for one in trainings(network)),
    ],
    tables=tables,
)

if __name__ == "__main__":
    fresh.answer(measure)
