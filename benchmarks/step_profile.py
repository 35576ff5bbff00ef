"""Where a step's time goes: torch's profiler on one core, whole batch against shards.

    python benchmarks/step_profile.py --out benchmarks/results/step_profile.json

It explains the other tables: what smaller shards cost in torch's own operators, whoever cuts the
batch, and what evenstep adds between them. One run each, no rounds: shares, not a race. Here malloc
keeps freed memory (`allocators.py`): page faults would land on whichever operator comes next.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import fresh
from allocators import ALLOCATORS
from records import RESULTS, Record

WAYS = (
    *(("whole", 1), ("shards", 2), ("shards", 8)),
    *(("evenstep", 2), ("evenstep", 8), ("hybridized", 8)),
)
JOBS: dict[str, dict[str, Any]] = {
    "lenet": {"examples": 256, "warmup_steps": 5, "steps": 30},
    "resnet18": {"examples": 64, "warmup_steps": 1, "steps": 5},
}


def main() -> None:
    """Profile each network each way, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "step_profile.json")
    options = parser.parse_args()
    record = Record("step_profile", options.out, settings=JOBS)
    for network, job in JOBS.items():
        for way, shards in WAYS:
            names = {"network": network, "way": way, "shards": shards}
            measured = fresh.run_module(
                "contenders.profiled_steps", {**names, **job}, variables=ALLOCATORS["keeps"]
            )
            record.add({**names, **measured})
            print(network, way, shards, f"{measured['step_ms']:.1f} ms", file=sys.stderr)


if __name__ == "__main__":
    main()
