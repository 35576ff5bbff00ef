"""Peak memory of training on 1, 2, 3 and 4 CPU devices, beside its bound.

    python benchmarks/memory.py --rounds 3 --out benchmarks/results/memory.json

Every figure is the peak resident memory (VmHWM) of a fresh process. The bound on k devices: one
device's peak + (k - 1) x (gradients + activations of one shard).

Each is measured twice: as a user has it, and with a malloc that gives every freed block of 64 KiB
and more back to the system at once (evenstep's own keeping of freed memory is switched off for it):
the difference is memory that is kept for the next step.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import fresh
from allocators import ALLOCATORS
from contenders.peak_memory import EXAMPLES, NETWORKS, STEPS
from evenstep.bench.rounds import rotated, summarise
from records import RESULTS, Record

SHARDS = 8
DEVICES = (1, 2, 3, 4)
MALLOCS = ("default", "gives_back")


def main() -> None:
    """Run the rounds, write the file, print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "memory.json")
    options = parser.parse_args()
    record = Record(
        "memory",
        options.out,
        settings={"shards": SHARDS, "examples": EXAMPLES, "steps": STEPS},
        sizes={network: _run(network, 0, "default") for network in NETWORKS},
    )
    variants = list(itertools.product(NETWORKS, DEVICES, MALLOCS))
    for number in range(options.rounds):
        for variant in rotated(variants, number):
            names = dict(zip(("network", "devices", "malloc"), variant, strict=True))
            record.add({"round": number, **names, **_run(*variant)})
            print(number, *variant, file=sys.stderr)
    for variant in variants:
        runs = [run for run in record.document["runs"] if _variant(run) == variant]
        peak = summarise([run["peak_bytes"] for run in runs]).median
        print(*variant, f"{peak / 2**20:.1f} MiB")


def _run(network: str, devices: int, malloc: str) -> dict[str, Any]:
    job = {"network": network, "devices": devices, "shards": SHARDS, "malloc": malloc}
    return fresh.run_module("contenders.peak_memory", job, variables=ALLOCATORS[malloc])


def _variant(run: dict[str, Any]) -> tuple[str, int, str]:
    return run["network"], run["devices"], run["malloc"]


if __name__ == "__main__":
    main()
