"""Training of text: nanoGPT's model of characters, a smaller one, and the fine-tuning of a BERT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmark import Benchmark
from evenstep.bench import Contender
from evenstep.bench.lineup import accelerate, ddp, devices, plain, trainers
from evenstep.bench.tables import Table
from specs import speed

STEPS = {
    "chargpt": {"examples": 64, "warmup_steps": 1, "steps": 1},
    "chargpt-small": {"examples": 64, "warmup_steps": 1, "steps": 6},
    "bert": {"examples": 64, "warmup_steps": 1, "steps": 10},
}


def lineup(network: str) -> list[Contender]:
    """Return the contenders that train a network."""
    job = {"network": network, **STEPS[network]}
    return [
        *(plain(job, threads) for threads in (1, 2)),
        ddp(job, 2),
        accelerate(job, 2),
        *trainers(job, 2),
        *(devices(job, count) for count in (1, 2)),
        devices(job, 2, shards=2),
        devices(job, 2, hybridize=True),
    ]


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return a table of speeds and one of ratios for each network."""
    return speed.tables(document, tuple(STEPS))


BENCHMARK = Benchmark(
    name="text_speed",
    contenders=[one for network in STEPS for one in lineup(network)],
    tables=tables,
    rounds=3,
)
