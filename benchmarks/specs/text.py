"""Training of text: nanoGPT's model of characters, a smaller one, and the fine-tuning of a BERT."""

from __future__ import annotations

import functools

from benchmark import Benchmark, Contender
from evenstep.bench.lineup import accelerate, ddp, devices, plain, trainers
from specs import speed

STEPS = {"chargpt": 1, "chargpt-small": 6, "bert": 10}


def lineup(network: str) -> list[Contender]:
    """Return the contenders that train a network."""
    job = {"network": network, "examples": 64, "warmup_steps": 1, "steps": STEPS[network]}
    return [
        *(plain(job, threads) for threads in (1, 2)),
        ddp(job, 2),
        accelerate(job, 2),
        *trainers(job, 2),
        *(devices(job, count) for count in (1, 2)),
        devices(job, 2, shards=2),
        devices(job, 2, hybridize=True),
    ]


tables = functools.partial(speed.tables, networks=tuple(STEPS))
BENCHMARK = Benchmark(
    name="text_speed",
    contenders=[one for network in STEPS for one in lineup(network)],
    tables=tables,
    rounds=3,
)
