"""Two processes on one machine: the exchange of ResNet-18's gradients, and training against DDP.

    python benchmarks/processes.py --rounds 5

Each variant runs once a round, in fresh processes under torchrun, in rotating order.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import fresh
from evenstep.bench.lineup import torchrun
from evenstep.bench.rounds import rotated, summarise
from lineup import STEPS
from records import RESULTS, Record

ELEMENTS = 11_173_962  # parameters of ResNet-18 with one channel and ten classes: 44.7 MB
EXCHANGE = {"elements": ELEMENTS, "warmup": 3, "repetitions": 15}
WAYS = {
    "gloo": "gloo's all_reduce",
    "network": "canonical sum, network",
    "memory": "canonical sum, shared memory, in place",
    "memory.copies": "canonical sum, shared memory, from and to own memory",
    "classic.root": "to a root and back",
    "classic.tree": "by a tree",
    "classic.ring": "around a ring",
    "classic.sharded": "sharded",
}
NETWORKS = {"lenet": 256, "resnet18": 128}
CONTENDERS = {
    "evenstep": ("evenstep.bench.contenders.evenstep_processes", "auto"),
    "ddp": ("evenstep.bench.contenders.ddp", "contiguous"),
    "ddp.channels_last": ("evenstep.bench.contenders.ddp", "channels_last"),
}


def main() -> None:
    """Run the rounds, write the file, print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("exchange", "training"))
    parser.add_argument("--out", type=Path, default=RESULTS / "processes.json")
    options = parser.parse_args()
    variants = [*_exchanges(), *_trainings()]
    if options.only:
        variants = [variant for variant in variants if variant["part"] == options.only]
    record = Record("processes", options.out, settings={"exchange": EXCHANGE, "batch": NETWORKS})
    for number in range(options.rounds):
        for variant in rotated(variants, number):
            try:
                measured = _run(variant)
            except fresh.RunFailedError as error:  # torch's own processes abort at times
                print(f"{error}\nonce more", file=sys.stderr)
                measured = _run(variant)
            figures = {key: measured[key] for key in FIGURES if key in measured}
            record.add({"round": number, "variant": variant["key"], **figures})
            print(number, variant["key"], figures, file=sys.stderr)
    for variant in variants:
        runs = [run for run in record.document["runs"] if run["variant"] == variant["key"]]
        name = next(key for key in FIGURES if key in runs[0])
        print(f"{variant['key']:32} {summarise([run[name] for run in runs]).median:10.2f} {name}")


FIGURES = ("median_ms", "examples_per_s")


def _run(variant: dict[str, Any]) -> dict[str, Any]:
    return fresh.run_module(
        variant["module"],
        variant["job"],
        launcher=torchrun(2),
        variables={"OMP_NUM_THREADS": "1"},
    )


def _exchanges() -> list[dict[str, Any]]:
    return [
        {
            "part": "exchange",
            "key": f"exchange.{way}",
            "module": "contenders.exchange",
            "job": {"way": way, **EXCHANGE},
        }
        for way in WAYS
    ]


def _trainings() -> list[dict[str, Any]]:
    return [
        {
            "part": "training",
            "key": f"{network}.{name}",
            "module": module,
            "job": {
                "network": network,
                "examples": examples,
                "workers": 2,
                "memory_format": layout,
                "warmup_steps": STEPS[network][0],
                "steps": STEPS[network][1],
            },
        }
        for network, examples in NETWORKS.items()
        for name, (module, layout) in CONTENDERS.items()
    ]


if __name__ == "__main__":
    main()
