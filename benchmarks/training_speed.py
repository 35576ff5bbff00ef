"""How fast evenstep trains, beside a plain loop, DDP, Accelerate and Lightning Fabric.

    python benchmarks/training_speed.py --rounds 5 --out benchmarks/results/training_speed.json

Every contender runs once a round, in a fresh process of its own, in an order that rotates from
round to round, over the same seeded batches and a fixed number of steps after warm-up. Five rounds
take 20 to 25 minutes on two cores (`--only lenet`, `--only resnet18`: about half of that each).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from evenstep.bench import Contender, missing, run_rounds, speeds, summarise
from evenstep.bench.running import shortened
from lineup import chosen
from records import RESULTS, Record


def main() -> None:
    """Run the rounds, write the file, print the medians."""
    options = parse()
    contenders = chosen(options.only)
    if options.steps is not None:
        contenders = [shortened(contender, options.steps) for contender in contenders]
    for absent in missing(contenders):
        print(f"left out, {absent.needs} is not installed: {absent.label}", file=sys.stderr)
    contenders = [contender for contender in contenders if contender.is_there]
    record = Record(
        "training_speed",
        options.out,
        settings={"rounds": options.rounds},
        contenders=[contender.described() for contender in contenders],
    )
    run_rounds(
        contenders,
        options.rounds,
        record,
        lambda run: print(
            f"{run['round']} {run['examples_per_s']:10.1f} {run['contender']}", file=sys.stderr
        ),
    )
    for contender in contenders:
        print(summary_line(contender, record))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "training_speed.json")
    parser.add_argument("--only", help="beginnings of contenders' keys, such as lenet,resnet18.ddp")
    parser.add_argument("--steps", type=int, help="timed steps, instead of each network's own")
    return parser.parse_args()


def summary_line(contender: Contender, record: Record) -> str:
    """Return a contender's line for the terminal."""
    found = summarise(list(speeds(record.document["runs"], contender.key).values()))
    spread = f"({found.least:.1f} to {found.most:.1f})"
    return f"{contender.network:9} {contender.label:48} {found.median:9.1f} examples/s {spread}"


if __name__ == "__main__":
    main()
