"""Predictions of `evenstep.planning`, written before the runs that they are compared with.

A case is a network, a V and a layout. Before each round, one device is measured with each network
and V; the machine is measured by exchanges without a training and by a step beside another, and the
network is what the case says it is. From these all speeds are predicted, and kept in the result
file. Then the cases run. Nothing is fitted to the runs. The error of a case is the median of those
of its rounds, each against the prediction of the same round. For one round more:

    python benchmarks/measure.py planned --rounds 1 --more

Machines are network namespaces of this one, with one core each: root is needed, and `tc` with a
token bucket. A delay is made by a program that carries the frames (tests/support/slow_cable.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import distributed

import evenstep
from benchmark import FOLDER, Benchmark, Contender, column, script
from evenstep.bench import fresh, lineup, workload
from evenstep.bench.rounds import Run, select
from evenstep.bench.tables import Table, number, verdict
from evenstep.devices import kept_memory
from evenstep.distributed import join, rendezvous
from evenstep.planning import (
    Arrangement,
    Link,
    Machine,
    Prediction,
    Work,
    parse_network,
    predict,
)
from machines import ADDRESSES, NAMES, ip, two_machines
from slow_cable import slow_cable
from specs import latency, uneven

NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "lenet": {"network": "lenet", "examples": 256, "warmup_steps": 6, "steps": 30},
    "resnet18": {"network": "resnet18", "examples": 32, "warmup_steps": 2, "steps": 6},
    "nanogpt": {"network": "chargpt-small", "examples": 32, "warmup_steps": 3, "steps": 10},
}
"""The trainings; the first steps of each are not timed."""

LAYOUTS: Mapping[str, str] = {
    "two": "2 devices",
    "slow": "2 devices, one half as fast",
    "stages": "2 stages",
    "slices": "2 devices, 2 slices",
    "memory": "2 processes, shared memory",
    "sockets": "2 processes, sockets",
    "owners": "2 processes, owners",
    "1Gbit": "2 machines, 1 Gbit",
    "100Mbit": "2 machines, 100 Mbit",
    "1ms": "2 machines, 1 ms of delay",
    "20ms": "2 machines, 20 ms of delay",
}
"""The layouts, each with its name in the table."""

SHARDS: Mapping[str, Mapping[str, Sequence[int]]] = {
    "two": dict.fromkeys(NETWORKS, (2, 4, 8, 16)),
    "slow": {"lenet": (4, 8, 16), "resnet18": (8,)},
    "stages": {"resnet18": (4, 8), "nanogpt": (4, 8)},
    "slices": dict.fromkeys(NETWORKS, (4,)),
    "memory": {"lenet": (2, 8, 16), "resnet18": (2, 8), "nanogpt": (2, 8)},
    "sockets": {"lenet": (2, 8, 16), "resnet18": (2, 8), "nanogpt": (2, 8)},
    "owners": dict.fromkeys(NETWORKS, (8,)),
    "1Gbit": dict.fromkeys(NETWORKS, (2, 8)),
    "100Mbit": dict.fromkeys(NETWORKS, (2,)),
    "1ms": {"lenet": (2, 8), "nanogpt": (2,)},
    "20ms": {"lenet": (2, 8), "nanogpt": (2,)},
}
"""The V of the cases."""

TARGETS = {"median": 0.05, "nine of ten": 0.12}
IN_ONE_PROCESS = ("two", "slow", "stages", "slices")
SLOWED = 2  # times, of the slow device
RATES = {"1Gbit": "1gbit", "100Mbit": "100mbit"}
DELAYS_S = {"1ms": 0.001, "20ms": 0.020}
SLOW_ADDRESSES = ("10.213.78.1", "10.213.78.2")
_MTU = 60_000  # of the cable with a delay: fewer frames to carry
_BEGIN_AFTER_S = 15.0  # until two processes that start at once have imported torch
_FACTS_NBYTES = 10**7


# ---- in the processes of a run


def measure(job: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the speed of a layout; or what the machine adds ("facts")."""
    if "facts" in job:
        return _exchanged(job["facts"])
    fields = {**job}
    layout = fields.pop("layout")
    if layout == "slow":
        devices = {"slowed": "delay", "factor": SLOWED, "devices": [0, 1], "steal": True}
        return {"examples_per_s": uneven.measure({**fields, **devices})["examples_per_s"]}
    return _trained(workload.Job(**fields), layout)


def _trained(job: workload.Job, layout: str) -> dict[str, Any] | None:
    if layout == "sockets":  # as on several machines
        rendezvous.shared_rounds = lambda *_: None
    divide = {
        "stages": evenstep.Stages("balanced:2:time"),
        "slices": evenstep.Slices(),
        "owners": evenstep.Owners(),
    }.get(layout, ())
    model, kind = workload.make_network(job), workload.find_workload(job.network)
    batches = workload.in_memory(workload.make_loader(job))
    with evenstep.Trainer(
        model,
        workload.make_optimizer(job, model),
        objective=kind.objective,
        devices=2 if layout in IN_ONE_PROCESS else 1,
        shards=job.shards,
        layout=evenstep.Layout(divide=divide),
    ) as trainer:

        def step() -> None:
            trainer.step(*next(batches))
            trainer.waitall()

        times_ms = workload.each_ms(step, job.steps, job.warmup_steps)
    if os.environ.get("RANK", "0") != "0":
        return None
    return {"examples_per_s": 1e3 * job.examples / statistics.median(times_ms)}


def _exchanged(method: str) -> dict[str, float] | None:
    """Return the seconds of a small and of a large exchange of two processes."""
    torch.set_num_threads(1)
    distributed.init_process_group(backend="gloo")
    if method == "network":
        rendezvous.shared_rounds = lambda *_: None
    peers = join(60.0)
    with peers.status_board, kept_memory():
        sizes = {"small_s": 1000, "large_s": _FACTS_NBYTES}
        found = {one: latency.median_ms(peers, method, n) / 1e3 for one, n in sizes.items()}
    distributed.destroy_process_group()
    return found if peers.rank == 0 else None


# ---- predictions: from one device, and from the machine


@functools.cache
def work_of(network: str, shards: int, slices: int = 0) -> Work:
    """Measure one device."""
    job = {**NETWORKS[network], "shards": shards, "memory_format": "preserve", "slices": slices}
    found = fresh.run_module("evenstep.cli.planning.measuring", job)["work"]
    return Work(**{**found, "shard_s": tuple(found["shard_s"])})


@functools.cache
def costs_of(network: str) -> tuple[float, float, float]:
    """Measure how two threads, and two processes, that each train alone slow each other down.

    The third figure is how long two threads take to meet.
    """
    job = {**NETWORKS[network], "shards": 8, "memory_format": "preserve"}
    module = "evenstep.cli.planning.measuring"
    alone = fresh.run_module(module, {**job, "beside": 2})
    together = {**job, "begins_s": time.time() + _BEGIN_AFTER_S, "steps": 2 * job["steps"]}
    both = fresh.run_commands([fresh.command_of(module, together)] * 2)
    own_s, slowed_s = (statistics.median(one["work"]["shard_s"]) for one in (alone, both))
    return alone["slowdown"][1], max(1.0, slowed_s / own_s), alone["meeting_s"]


@functools.cache
def machine_of(network: str) -> Machine:
    """Return what was measured of this machine, for a network."""
    exchanged = {
        method: fresh.run_module(
            "specs.planned",
            {"facts": method},
            launcher=lineup.torchrun(2),
            folder=FOLDER,
            variables={"OMP_NUM_THREADS": "1"},
        )
        for method in ("memory", "network")
    }
    by_memory, by_network = exchanged["memory"], exchanged["network"]
    latency_s = by_network["small_s"] / 2  # a message is asked for, and sent
    sent_s = max(1e-6, by_network["large_s"] - 2 * by_network["small_s"])
    copied_s = max(1e-6, by_memory["large_s"] - by_memory["small_s"])
    threads, processes, meeting_s = costs_of(network)
    return Machine(
        devices=2,
        slowdown=(1.0, threads),
        process_slowdown=(1.0, processes),
        copied_bytes_per_s=3 * _FACTS_NBYTES / copied_s,  # in, added, and out
        local=Link(bytes_per_s=_FACTS_NBYTES / sent_s, latency_s=latency_s),
        shared_s=by_memory["small_s"],
        meeting_s=meeting_s,
    )


def predicted(network: str, work: Work, layout: str) -> Prediction:
    """Return what is predicted for a case."""
    machine = machine_of(network)
    processes = layout not in IN_ONE_PROCESS
    apart = layout in RATES or layout in DELAYS_S
    own_s = machine.local.latency_s  # what the processes add to the cable's delay
    fast = machine.local.bytes_per_s
    if layout in RATES:
        given = parse_network(layout)
        link = Link(bytes_per_s=min(fast, given.bytes_per_s), latency_s=own_s)
    else:
        link = Link(bytes_per_s=fast, latency_s=own_s + DELAYS_S.get(layout, 0.0))
    if apart:  # the machines are one: their processes slow each other down
        slowed = machine.process_slowdown[1]
        machine = dataclasses.replace(machine, network=link, process_slowdown=(slowed,))
    arrangement = Arrangement(
        devices=2,
        per_machine=1 if apart else 2,
        per_process=1 if processes else 2,
        divide=layout if layout in ("stages", "slices", "owners") else "data",  # type: ignore[arg-type]
        stages=2 if layout == "stages" else 1,
        sockets=layout == "sockets",
        speeds=(1.0, 1 / SLOWED) if layout == "slow" else (),
    )
    return predict(work, machine, arrangement)


@functools.cache
def prediction_of(key: str) -> Mapping[str, float]:
    """Return the prediction for a case, with its range, and the speed of one device."""
    job = next(one.job for one in BENCHMARK.contenders if one.key == key)
    work = work_of(job["case"], job["shards"], job.get("slices", 0))
    found = predicted(job["case"], work, job["layout"])
    whole = work_of(job["case"], job["shards"])  # the speed-up is over a model without slices
    alone_s = whole.shards * whole.usual_s + whole.update_s + whole.rest_s
    return {
        "predicted": found.examples_per_s,
        "least": found.least,
        "most": found.most,
        "alone": whole.examples / alone_s,
    }


def predict_round(contenders: Sequence[Contender]) -> Iterator[dict[str, Any]]:
    """Measure this machine anew, and yield the predictions for a round."""
    for measured in (work_of, costs_of, machine_of, prediction_of):
        measured.cache_clear()
    for one in contenders:
        yield {"case": one.key, **prediction_of(one.key)}


# ---- runs


def run_case(contender: Contender) -> dict[str, Any]:
    """Run a case that was predicted."""
    job = {**contender.job}
    del job["case"]
    found = prediction_of(contender.key)
    return {**found, "measured": _run(contender, job)["examples_per_s"]}


def _run(contender: Contender, job: Mapping[str, Any]) -> dict[str, Any]:
    layout = job["layout"]
    if layout in IN_ONE_PROCESS:
        return fresh.run_module(contender.module, job, folder=FOLDER)
    variables = {"OMP_NUM_THREADS": "1"}
    if layout in ("memory", "sockets", "owners"):
        launcher = lineup.torchrun(2)
        return fresh.run_module(contender.module, job, launcher, folder=FOLDER, variables=variables)
    with _cable(layout) as (addresses, interface):
        commands = []
        for machine, address in zip(NAMES, addresses, strict=True):
            host = addresses[0]
            launcher = (
                *("torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:29512"),
                *("--rdzv-id", "planned", "--local-addr", address),
                *("--rdzv-conf", f"is_host={int(address == host)}"),
            )
            command = fresh.command_of(contender.module, job, launcher)
            commands.append(["ip", "netns", "exec", machine, *command])
        variables["GLOO_SOCKET_IFNAME"] = interface
        return fresh.run_commands(commands, folder=FOLDER, variables=variables)


@contextlib.contextmanager
def _cable(layout: str) -> Iterator[tuple[Sequence[str], str]]:
    """Join two machines by the cable of a layout; yield their addresses and their interface."""
    with contextlib.ExitStack() as opened:
        machines = opened.enter_context(two_machines())
        if layout in RATES:
            bucket = ["root", "tbf", "rate", RATES[layout], "burst", "64kb", "latency", "100ms"]
            for machine in machines:
                ip("netns", "exec", machine, "tc", "qdisc", "add", "dev", "eth0", *bucket)
            yield ADDRESSES, "eth0"
            return
        slow = slow_cable(machines, SLOW_ADDRESSES, delay_s=DELAYS_S[layout], loss=0.0)
        opened.enter_context(slow)
        for machine in machines:
            ip("-n", machine, "link", "set", "slow0", "mtu", str(_MTU))
        yield SLOW_ADDRESSES, "slow0"


# ---- tables


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of all cases, and that of the errors: medians over rounds of the ratio."""
    runs, rows, errors, rounds = document["runs"], [], [], set()
    for one in BENCHMARK.contenders:
        own = select(runs, case=one.key)
        if not own:
            continue
        each = [*map(_error, own)]
        error = statistics.median(each)
        errors.append(abs(error))
        rounds.add(len(own))
        speeds = [number(statistics.median(column(own, f))) for f in ("predicted", "measured")]
        layout, shards = LAYOUTS[one.job["layout"]], str(one.job["shards"])
        gain = statistics.median(run["measured"] / run["alone"] for run in own)
        spread = f"{min(each):+.1%} to {max(each):+.1%}" if len(own) > 1 else "one round"
        rows.append(
            [one.job["case"], layout, shards, *speeds, f"{error:+.1%}", spread, f"{gain:.2f}"]
        )
    errors.sort()
    found = {"median": errors[len(errors) // 2], "nine of ten": errors[int(0.9 * len(errors))]}
    summary = [
        [name, f"{found[name]:.1%}", *verdict([found[name]], at_most=most, spell="{:.0%}".format)]
        for name, most in TARGETS.items()
    ]
    heads = ("network", "layout", "V", "predicted, examples/s", "measured")
    heads += ("error", "of the rounds", "speed-up")
    counts = " to ".join(map(str, sorted({min(rounds), max(rounds)})))
    each_of = f"{counts} round{'s' * (max(rounds) > 1)} each"
    return {
        "cases": Table(heads, rows, 2),
        "errors": Table(
            (f"error of {len(errors)} cases, {each_of}", "", "target", "verdict"),
            summary,
        ),
    }


def _error(run: Run) -> float:
    return float(run["predicted"] / run["measured"] - 1)


def _case(layout: str, network: str, shards: int) -> Contender:
    key = f"{layout}.{network}.v{shards}"
    job = {**NETWORKS[network], "case": network, "layout": layout, "shards": shards}
    if layout == "slices":
        job["slices"] = 2
    return script("planned", key, job, names={"case": key})


BENCHMARK = Benchmark(
    name="planned",
    settings={"networks": NETWORKS, "slowed": SLOWED},
    contenders=[
        _case(layout, network, shards)
        for layout, networks in SHARDS.items()
        for network, all_shards in networks.items()
        for shards in all_shards
    ],
    predict=predict_round,
    measure=run_case,
    tables=tables,
    rounds=1,
)
