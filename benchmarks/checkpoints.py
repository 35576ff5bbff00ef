"""What training waits for where it saves: ResNet-18 with momentum, on two devices.

    python benchmarks/checkpoints.py --rounds 5

Each variant runs once a round, in a fresh process, in rotating order.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import fresh
from evenstep.bench.rounds import rotated
from records import RESULTS, Record

VARIANTS = {
    "never": "without saving",
    "waiting": "`save(folder)`: on the disk when it returns",
    "aside": "`save(folder, aside=True)`: written while training goes on",
}
SETTINGS = {"batch": 64, "warmup_steps": 2, "steps": 12, "every": 4}


def main() -> None:
    """Run the rounds, write the file, print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "checkpoints.json")
    options = parser.parse_args()
    record = Record("checkpoints", options.out, settings=SETTINGS, variants=VARIANTS)
    for number in range(options.rounds):
        for variant in rotated(list(VARIANTS), number):
            measured = fresh.run_module("contenders.saves", {"save": variant, **SETTINGS})
            record.add({"round": number, "variant": variant, **measured})
            print(f"{number} {variant} {measured['step_ms']:.0f} ms a step", file=sys.stderr)
    for variant, label in VARIANTS.items():
        runs = [run for run in record.document["runs"] if run["variant"] == variant]
        median = statistics.median(run["step_ms"] for run in runs)
        print(f"{label:60} {median:.0f} ms a step")


if __name__ == "__main__":
    main()
