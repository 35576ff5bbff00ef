"""A small network called again and again: as it is, and as `evenstep.hybridize` calls it.

    python benchmarks/hybridize.py --rounds 5

The network and the thousand calls are those of Dive into Deep Learning, "Compilers and
Interpreters". Every round is a fresh process, in which both are timed in turns.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import fresh
from evenstep.bench.rounds import summarise
from records import RESULTS, Record

SETTINGS = {"calls": 1000, "rounds": 15}


def main() -> None:
    """Run the rounds, write the file, print the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "hybridize.json")
    options = parser.parse_args()
    record = Record("hybridize", options.out, settings=SETTINGS)
    for number in range(options.rounds):
        measured = fresh.run_module("evenstep.book.reproduce.hybrid_calls", SETTINGS)
        record.add({"round": number, **measured})
        print(number, measured, file=sys.stderr)
    gains = [run["eager_us"] / run["hybrid_us"] for run in record.document["runs"]]
    print(f"hybridized {summarise(gains).median:.2f} times as fast")


if __name__ == "__main__":
    main()
