"""What a step costs beside the model: an empty model, V = 8, on 1 and 2 devices.

    python benchmarks/step_overhead.py --rounds 5 --out benchmarks/results/step_overhead.json

Each variant runs once a round, in a fresh process, in rotating order; a run's figure is the median
over its steps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import fresh
from evenstep.bench.rounds import rotated, summarise
from records import RESULTS, Record

VARIANTS = {
    "plain": "plain loop over the shards",
    "1": "evenstep, 1 device",
    "2": "evenstep, 2 devices",
    "2.inline": "evenstep, 2 devices, their lanes in one thread",
}
JOBS: dict[str, dict[str, Any]] = {
    "plain": {"devices": 0},
    "1": {"devices": 1},
    "2": {"devices": 2},
    "2.inline": {"devices": 2, "inline": True},
}
SHARDS = 8
WARMUP_STEPS = 200


def main() -> None:
    """Run the rounds, write the file, print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=RESULTS / "step_overhead.json")
    options = parser.parse_args()
    settings = {"shards": SHARDS, "warmup_steps": WARMUP_STEPS, "steps": options.steps}
    record = Record("step_overhead", options.out, settings=settings, variants=VARIANTS)
    for number in range(options.rounds):
        for variant in rotated(list(VARIANTS), number):
            measured = fresh.run_module("contenders.empty_steps", {**JOBS[variant], **settings})
            record.add({"round": number, "variant": variant, **measured})
            print(f"{number} {VARIANTS[variant]} {measured['median_ms']:.3f} ms", file=sys.stderr)
    for variant, label in VARIANTS.items():
        runs = [run for run in record.document["runs"] if run["variant"] == variant]
        print(f"{label:28} {summarise([run['median_ms'] for run in runs]).median:.3f} ms a step")


if __name__ == "__main__":
    main()
