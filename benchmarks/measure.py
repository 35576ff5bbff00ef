"""Measure a benchmark and write its result file.

    python benchmarks/measure.py memory --rounds 3

Every contender is measured once per round, in a fresh process, in rotating order.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmark import RESULTS, Benchmark, Contender, command_line
from evenstep.bench import Record, installed, results, run_rounds
from evenstep.bench.rounds import Run
from evenstep.bench.tables import NOT_MEASURED, small
from evenstep.cli.terminal.output import numbers_table, print_table

NAMES = (
    "speed overhead memory profile uneven processes latency cable hybridize engine kills "
    "checkpoints contract first_step flips soak interrupts text stages owners kinds recording "
    "portable embeddings copies planned free_threaded crowds"
)
MODULES = [importlib.import_module(f"specs.{name}") for name in NAMES.split()]
BENCHMARKS: dict[str, Benchmark] = {one.BENCHMARK.name: one.BENCHMARK for one in MODULES}
tell = functools.partial(print, file=sys.stderr)


def main() -> None:
    """Measure what the command line asks for."""
    options = parse(sys.argv[1:])
    benchmark = BENCHMARKS[options.benchmark]
    out = options.out or RESULTS / f"{benchmark.name}.json"
    rounds = options.rounds or benchmark.rounds
    earlier = results.load(out) if options.more else None
    measure(shortened(benchmark, options.only, options.steps), rounds, out, earlier)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=Path, help="by default, benchmarks/results/BENCHMARK.json")
    parser.add_argument("--only", help="keys of contenders, or their beginnings, between commas")
    parser.add_argument("--steps", type=int, help="timed steps, instead of each contender's own")
    parser.add_argument("--more", action="store_true", help="add the rounds to those in the file")
    return parser.parse_args(arguments)


def shortened(benchmark: Benchmark, only: str | None, steps: int | None) -> Benchmark:
    """Return the benchmark with the contenders that `only` names, and with `steps` timed steps."""
    contenders, settings = choose(benchmark.contenders, only), benchmark.settings
    if steps is not None:
        contenders = [
            dataclasses.replace(one, job={**one.job, "steps": steps}) for one in contenders
        ]
        settings = {**settings, "steps": steps}
    return dataclasses.replace(benchmark, contenders=contenders, settings=settings)


def choose(contenders: Sequence[Contender], only: str | None) -> list[Contender]:
    """Return the contenders that `only` names, between commas; all of them for None.

    A whole key names that contender alone; the beginning of keys names all that start with it.
    """
    names = only.split(",") if only else [""]
    whole = {one.key for one in contenders}.intersection(names)
    begins = tuple(set(names) - whole)
    found = [one for one in contenders if one.key in whole or one.key.startswith(begins)]
    if not found:
        keys = ", ".join(one.key for one in contenders)
        raise SystemExit(f"got --only {only}: expected the beginnings of some of {keys}")
    return found


def measure(
    benchmark: Benchmark, rounds: int, out: Path, earlier: Mapping[str, Any] | None = None
) -> None:
    """Run the rounds, after those of an earlier document; write the file, print the medians."""
    contenders = installed(benchmark.contenders, tell)
    record = Record(
        benchmark.name,
        command_line(sys.argv),
        out,
        settings={"rounds": rounds, **benchmark.settings},
        contenders=[one.described() for one in contenders],
        **benchmark.fields(),
    )
    if earlier is not None:
        record.go_on(earlier)
    with benchmark.place():
        run_rounds(contenders, rounds, record, show, benchmark.measure, benchmark.predict)
    for name, table in benchmark.tables(record.document).items():
        if any(row[-1] != NOT_MEASURED for row in table.rows):
            print(f"\n{name}")
            print_table(Console(), numbers_table(table.head, table.rows))


def show(run: Run) -> None:
    """Print a run as a line of progress."""
    figures = [
        f"{name} {small(value) if isinstance(value, float) else value}"
        for name, value in run.items()
        if isinstance(value, float | int | str)
    ]
    tell(", ".join(figures))


if __name__ == "__main__":
    main()
