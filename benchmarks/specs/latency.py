"""How long processes wait for each other: exchanges of every size, and steps of a tiny network."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import distributed, nn

from benchmark import FOLDER, Benchmark, Contender, script
from evenstep.bench import lineup, paired_ratios
from evenstep.bench.rounds import Run, by_round
from evenstep.bench.tables import Table, cells, median, small, verdict
from evenstep.collectives import forest
from evenstep.devices import kept_memory
from evenstep.distributed import Exchange, Peers, join, rendezvous
from evenstep.distributed.flat_buffers import FlatSpace
from evenstep.distributed.gradient_reduce import BUCKET_BYTES, NetworkReducer
from evenstep.distributed.shared.reduce import SharedMemoryReducer

REPORT, EVERYONE = bytes(200), Exchange("step", "its part")
SIZES = {"1 kB": 10**3, "10 kB": 10**4, "100 kB": 10**5, "1 MB": 10**6, "10 MB": 10**7}
SIZES |= {"100 MB": 10**8}
PROCESSES = (2, 4, 8)
METHODS = ("gloo", "copied", "memory", "network")
"""How gradients are exchanged: by all_reduce in place, or from and to own memory; and by ours."""
AT_MOST = 1.5  # times gloo's all_reduce, of sockets
ROUND_TRIP_MS, SMALL = 0.3, 10**4  # of exchanges of few bytes, with a core for each process

STEPS = {"warmup_steps": 40, "steps": 300}
TINY = {"network": "specs.latency:mlp", "shape": [16], "examples": 64, **STEPS}
OVER_DDP = {2: 1.2, 8: None}
"""Values of V, and the target for the time of a step over that of DDP."""


def mlp() -> nn.Module:
    """Return a network of three hidden layers of 32: 12 kB of gradients."""
    sizes = [16, 32, 32, 32]
    hidden = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in itertools.pairwise(sizes)]
    return nn.Sequential(*hidden, nn.Linear(32, 10))


def measure(job: Mapping[str, Any]) -> dict[str, float] | None:
    """Return, by size, the median milliseconds until the slowest process is done, in the first."""
    torch.set_num_threads(1)
    distributed.init_process_group(backend="gloo")
    if job["method"] == "network":  # as on several machines
        rendezvous.shared_rounds = lambda *_: None
    peers = join(60.0)
    with peers.status_board, kept_memory():  # as a trainer keeps it
        found = {name: median_ms(peers, job["method"], SIZES[name]) for name in SIZES}
    distributed.destroy_process_group()
    return found if peers.rank == 0 else None


def median_ms(peers: Peers, method: str, nbytes: int) -> float:
    """Return the median milliseconds of an exchange of so many bytes."""
    once, times_s = prepared(peers, method, torch.ones(nbytes // 4)), []
    warmup, timed = (20, 200) if nbytes < 10**6 else (3, 15)
    for _ in range(warmup + timed):
        distributed.barrier()
        began_s = time.perf_counter()
        once()
        times_s.append(time.perf_counter() - began_s)
    slowest = torch.tensor(times_s[warmup:], dtype=torch.float64)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    return 1e3 * statistics.median(slowest.tolist())


def prepared(peers: Peers, method: str, vector: torch.Tensor) -> Callable[[], object]:
    """Return what exchanges a vector once, as a step does: from own memory, and to own memory."""
    if method == "gloo":
        return functools.partial(distributed.all_reduce, vector)
    if method == "copied":
        return functools.partial(copied_all_reduce, vector, vector.clone())
    parameters = [*vector.split(10**5)]
    flats = FlatSpace(parameters, range(len(parameters)))
    trees = forest(peers.size, peers.size, tuple(range(r, r + 1) for r in range(peers.size)))
    make = SharedMemoryReducer if method == "memory" else NetworkReducer
    reducer = make(peers, flats, BUCKET_BYTES)
    reducer.reserve(trees, 0)

    def once() -> None:
        sending = reducer.begin(trees, len(parameters), 0)
        sending.write_rest([[*parameters]])
        peers.gather(REPORT, EVERYONE)
        sending.total()

    return once


def copied_all_reduce(vector: torch.Tensor, buffer: torch.Tensor) -> None:
    """Sum a vector over processes in another one's memory, as whoever keeps gradients must."""
    buffer.copy_(vector)
    distributed.all_reduce(buffer)
    vector.copy_(buffer)


def exchange(processes: int, method: str) -> Contender:
    """Return a method to exchange gradients."""
    more = {"launcher": lineup.torchrun(processes), "threads": 1}
    return script("latency", f"{method}.{processes}", {"method": method}, **more)


def trainings() -> list[Contender]:
    """Return the tiny network with each V and in DDP, in two processes; then in more."""
    found = {f"v{V}": lineup.processes({**TINY, "shards": V}, 2) for V in OVER_DDP}
    more = {**TINY, "shards": max(PROCESSES)}
    found |= {f"growth{number}": lineup.processes(more, number) for number in PROCESSES}
    found["ddp"] = lineup.ddp(TINY, 2)
    return [
        dataclasses.replace(one, key=key, names={"variant": key}, folder=FOLDER)
        for key, one in found.items()
    ]


def exchange_row(runs: list[Run], processes: int, size: str) -> list[str]:
    """Return the row of exchanges of some bytes, each beside gloo's all_reduce."""
    found = {one: by_round(runs, size, variant=f"{one}.{processes}") for one in METHODS}
    times = [median(found[one].values(), small) for one in ("gloo", "memory", "network")]
    copied, sockets = (paired_ratios(found[one], found["gloo"]) for one in ("copied", "network"))
    judged = verdict(sockets, at_most=AT_MOST, spell="{}×".format)
    row = [str(processes), size, *times, median(copied, unit="×")]
    return [*row, *cells(sockets, unit="×"), *judged]


def round_trip_row(runs: list[Run], size: str) -> list[str]:
    """Return the row of a small exchange through the memory of two processes."""
    own = by_round(runs, size, variant=f"memory.{PROCESSES[0]}").values()
    return [size, *cells(own, small), *verdict(own, at_most=ROUND_TRIP_MS, spell="{} ms".format)]


def step_row(runs: list[Run], V: int) -> list[str]:
    """Return the row of the tiny network with this V."""
    own = step_ms(runs, f"v{V}")
    ddp = step_ms(runs, "ddp")
    ratios = paired_ratios(own, ddp)
    judged = verdict(ratios, at_most=OVER_DDP[V], spell="{}×".format)
    return [f"V = {V}", median(own.values()), median(ddp.values()), *cells(ratios), *judged]


def growth_row(runs: list[Run], processes: int) -> list[str]:
    """Return the row of the tiny network in some processes, beside two."""
    own = step_ms(runs, f"growth{processes}")
    ratios = paired_ratios(own, step_ms(runs, f"growth{PROCESSES[0]}"))
    at_most = processes / PROCESSES[0] if processes > PROCESSES[0] else None
    judged = verdict(ratios, at_most=at_most, spell="{}×".format)
    return [str(processes), median(own.values()), *cells(ratios), *judged]


def step_ms(runs: list[Run], variant: str) -> dict[int, float]:
    """Return the milliseconds of a step, by round."""
    speeds = by_round(runs, "examples_per_s", variant=variant)
    return {number: 1e3 * TINY["examples"] / speed for number, speed in speeds.items()}


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the tables of exchanges, of small ones through memory, and of steps."""
    runs = document["runs"]
    rows = [exchange_row(runs, processes, size) for processes in PROCESSES for size in SIZES]
    times = ("all_reduce, ms", "shared memory, ms", "sockets, ms")
    ratios = ("own memory over all_reduce", "sockets over all_reduce", "spread")
    head = ("processes", "gradients", *times, *ratios, "target", "verdict")
    small_ones = [size for size, nbytes in SIZES.items() if nbytes <= SMALL]
    trips = Table(
        ("gradients", "ms", "spread", "target", "verdict"),
        [round_trip_row(runs, size) for size in small_ones],
    )
    heads = ("evenstep", "ms a step", "DDP", "ratio", "spread", "target", "verdict")
    steps = [step_row(runs, V) for V in OVER_DDP]
    measured = [one for one in PROCESSES if step_ms(runs, f"growth{one}")]
    growth = [growth_row(runs, processes) for processes in measured]
    grown = Table(("processes", "ms a step", "over two", "spread", "target", "verdict"), growth)
    found = {"exchanges": Table(head, rows, 2), "round_trips": trips}
    return {**found, "steps": Table(heads, steps), "growth": grown}


BENCHMARK = Benchmark(
    name="latency",
    settings={"steps": STEPS, "examples": TINY["examples"]},
    contenders=[
        *(exchange(processes, method) for processes in PROCESSES for method in METHODS),
        *trainings(),
    ],
    tables=tables,
)
