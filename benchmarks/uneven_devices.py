"""Devices of different speed: both together against the sum of what each does alone.

    python benchmarks/uneven_devices.py --rounds 5

One of two CPU devices is slowed three times, by a delay in its lane or by two busy processes on its
core. Each measurement runs once a round, in a fresh process, in rotating order.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import fresh
from evenstep.bench.rounds import rotated
from records import RESULTS, Record

FACTOR = 3
JOB = {"network": "lenet", "examples": 1024, "shards": 8, "warmup_steps": 10, "steps": 40}
PARTS = {
    "fast alone": {"devices": [0], "slowed": "no"},
    "rivals.fast alone": {"devices": [0], "slowed": "rivals"},  # on the other core
    **{
        f"{slowed}.{name}": {"slowed": slowed, **part}
        for slowed in ("delay", "rivals")
        for name, part in (
            ("slow alone", {"devices": [1]}),
            ("both", {"devices": [0, 1]}),
            ("both, without stealing", {"devices": [0, 1], "steal": False}),
        )
    },
    "even": {"devices": [0, 1], "slowed": "no"},
}


def main() -> None:
    """Run the rounds, write the file, print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=JOB["steps"])
    parser.add_argument("--out", type=Path, default=RESULTS / "uneven_devices.json")
    options = parser.parse_args()
    job = {**JOB, "steps": options.steps}
    record = Record("uneven_devices", options.out, settings={**job, "factor": FACTOR})
    for number in range(options.rounds):
        for name in rotated(list(PARTS), number):
            wanted = {"steal": True, "max_in_flight": 1, "factor": FACTOR, **PARTS[name]}
            found = fresh.run_module("contenders.uneven_lanes", {**wanted, "job": job})
            record.add({"round": number, "part": name, **found})
            print(f"{number} {name}: {found['examples_per_s']:,.0f}/s", file=sys.stderr)
    for slowed in ("delay", "rivals"):
        for name in ("both", "both, without stealing"):
            share = statistics.median(shares_of_sum(record.document["runs"], slowed, name))
            print(f"{slowed:7} {name:24} {share:.2f} of the sum of both devices' own speeds")


def shares_of_sum(runs: list[dict[str, Any]], slowed: str, name: str) -> list[float]:
    """Return, round by round, the speed of both over the sum of each one's own.

    Rivals that keep the slow device's core busy slow the fast one's too (caches, memory), so its
    own speed is that beside them.
    """
    by_round: dict[int, dict[str, float]] = {}
    for run in runs:
        by_round.setdefault(run["round"], {})[run["part"]] = run["examples_per_s"]
    shares = []
    for speeds in by_round.values():
        fast = speeds.get(f"{slowed}.fast alone", speeds.get("fast alone"))
        slow, both = speeds.get(f"{slowed}.slow alone"), speeds.get(f"{slowed}.{name}")
        if fast and slow and both:
            shares.append(both / (fast + slow))
    return shares


if __name__ == "__main__":
    main()
