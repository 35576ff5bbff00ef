"""Two machines with a cable of 1 Gbit/s between them: ResNet-18 in training, against DDP.

The machines are two network namespaces of this one, with one core each. Root is needed, and `tc`
with a token bucket.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from benchmark import TRAINING_STEPS, Benchmark, Contender
from evenstep.bench import fresh, lineup, paired_ratios
from evenstep.bench.rounds import by_round
from evenstep.bench.tables import Table, cells
from machines import ADDRESSES, NAMES, ip, two_machines

RATE = "1gbit"
JOB = {"network": "resnet18", "examples": 128, **TRAINING_STEPS["resnet18"]}


@contextlib.contextmanager
def cable() -> Iterator[None]:
    """Join two machines by a cable, each end of which lets RATE through."""
    bucket = ["root", "tbf", "rate", RATE, "burst", "256kb", "latency", "50ms"]
    with two_machines() as machines:
        for machine in machines:
            ip("netns", "exec", machine, "tc", "qdisc", "add", "dev", "eth0", *bucket)
        yield


def on_both(contender: Contender) -> dict[str, Any]:
    """Run a contender under torchrun on both machines."""
    host, commands = ADDRESSES[0], []
    for machine, address in zip(NAMES, ADDRESSES, strict=True):
        launcher = (
            *("torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:29511", "--rdzv-id", "cable"),
            *("--local-addr", address, "--rdzv-conf", f"is_host={int(address == host)}"),
        )
        command = fresh.command_of(contender.module, contender.job, launcher)
        commands.append(["ip", "netns", "exec", machine, *command])
    variables = {"GLOO_SOCKET_IFNAME": "eth0", **contender.variables}
    measured = fresh.run_commands(commands, variables=variables)
    return {"examples_per_s": measured["examples_per_s"]}


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of speeds."""
    rows, ddp = [], by_round(document["runs"], "examples_per_s", variant="ddp")
    for one in BENCHMARK.contenders:
        own = by_round(document["runs"], "examples_per_s", variant=one.key)
        ratios = [] if one.key == "ddp" else paired_ratios(own, ddp)
        rows.append([one.label, *cells(own.values()), *cells(ratios, unit="×")])
    return {"speeds": Table(("training", "examples/s", "spread", "over DDP", "spread of it"), rows)}


BENCHMARK = Benchmark(
    name="cable",
    settings={"rate": RATE, **JOB},
    contenders=[
        dataclasses.replace(one, key=key, label=label, names={"variant": key})
        for key, label, one in (
            ("evenstep", "evenstep, V = 8", lineup.processes(JOB, 2)),
            ("evenstep.2", "evenstep, V = 2", lineup.processes({**JOB, "shards": 2}, 2)),
            ("ddp", "DDP", lineup.ddp(JOB, 2)),
            ("ddp.channels_last", "DDP, channels-last", lineup.ddp(JOB, 2, "channels_last")),
        )
    ],
    place=cable,
    measure=on_both,
    tables=tables,
)
