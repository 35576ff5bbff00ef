"""The book's experiments with the engine: queues, waiting, parallelism, copies, memory, cost.

    python benchmarks/engine_experiments.py --rounds 5

Each measurement runs once a round, in a fresh process, in rotating order. Prints what the book
printed, what was measured here, and the ratio of both. Five rounds take a quarter of an hour on two
cores (`--only queued,waiting,together,copies,cost`: half of that).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import finding_rows
import fresh
from evenstep.bench.rounds import rotated
from evenstep.book.reproduce.book import EXPERIMENTS
from evenstep.book.reproduce.findings import small
from evenstep.book.reproduce.lineup import BOOK, TINY, Measurement, lineup
from records import RESULTS, Record


def main() -> None:
    """Run the rounds, write the file, print the rows."""
    options = parse()
    sizes = TINY if options.tiny else BOOK
    measurements = chosen(lineup(sizes), options.only)
    record = Record("engine_experiments", options.out, settings=sizes)
    for number in range(options.rounds):
        for measurement in rotated(measurements, number):
            figures = fresh.run_module(measurement.module, measurement.job)
            record.add({"round": number, "key": measurement.key, **figures})
            told = ", ".join(f"{name} {small(value)}" for name, value in figures.items())
            print(f"{number} {measurement.key}: {told}", file=sys.stderr)
    for experiment, rows in EXPERIMENTS.items():
        print_rows(
            experiment, [finding_rows.row(finding, record.document["runs"]) for finding in rows]
        )


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "engine_experiments.json")
    parser.add_argument("--only", help="beginnings of measurements' keys, such as cost,waiting.mm")
    parser.add_argument(
        "--tiny", action="store_true", help="see that it runs; figures mean nothing"
    )
    return parser.parse_args()


def chosen(measurements: list[Measurement], only: str | None) -> list[Measurement]:
    """Return the measurements whose keys begin as `only` says; all of them for None."""
    if only is None:
        return measurements
    found = [one for one in measurements if one.key.startswith(tuple(only.split(",")))]
    if not found:
        raise SystemExit(f"--only {only} names no measurement: use the beginning of a key")
    return found


def print_rows(experiment: str, rows: list[list[str]]) -> None:
    """Print an experiment's rows for the terminal, in columns, if any was measured."""
    if all(row[-1] == "not measured" for row in rows):
        return
    head = [experiment, *finding_rows.HEAD[1:]]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for cells in (head, *rows):
        first, *others = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        print("  ".join([f"{first.strip():{widths[0]}}", *others]))
    print()


if __name__ == "__main__":
    main()
