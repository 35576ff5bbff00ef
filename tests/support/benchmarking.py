"""Puts `benchmarks/` on the path, from which its modules import one another."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

FACTS = {
    "date_utc": "2025-01-02 03:04",
    "cpu": "a processor",
    "cpu_capability": "AVX2",
    "usable_cores": 2,
    "memory_gib": 8.0,
    "load_average_at_start": 0.1,
    "system": "Linux x86_64",
    "python": "3.11.0",
    "packages": {"torch": "2.13.0", "accelerate": None},
    "git_revision": "abc",
}
