"""How fast evenstep trains, beside a plain loop, DDP, Accelerate and Lightning Fabric.

    python benchmarks/training_speed.py --rounds 5 --out benchmarks/results/training_speed.json

Every contender runs once a round, in a fresh process of its own, in an order that rotates from
round to round, over the same seeded batches and a fixed number of steps after warm-up. Five rounds
take 20 to 25 minutes on two cores (`--only lenet`, `--only resnet18`: about half of that each).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import fresh
from lineup import Contender, chosen
from records import RESULTS, Record
from rounds import rotated, summarise


def main() -> None:
    """Run the rounds, write the file, print the medians."""
    options = parse()
    contenders = [_shortened(contender, options) for contender in chosen(options.only)]
    for missing in (contender for contender in contenders if not contender.is_there):
        print(f"left out, {missing.needs} is not installed: {missing.label}", file=sys.stderr)
    contenders = [contender for contender in contenders if contender.is_there]
    record = Record(
        "training_speed",
        options.out,
        settings={"rounds": options.rounds},
        contenders=[describe(contender) for contender in contenders],
    )
    for number in range(options.rounds):
        for contender in rotated(contenders, number):
            run = {"contender": contender.key, "round": number, **measure(contender)}
            record.add(run)
            print(f"{number} {run['examples_per_s']:10.1f} {contender.key}", file=sys.stderr)
    for contender in contenders:
        print(summary_line(contender, record.document["runs"]))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "training_speed.json")
    parser.add_argument("--only", help="beginnings of contenders' keys, such as lenet,resnet18.ddp")
    parser.add_argument("--steps", type=int, help="timed steps, instead of each network's own")
    return parser.parse_args()


def measure(contender: Contender) -> dict[str, Any]:
    """Run a contender in a fresh process; once more if it fails, which the file then says.

    gloo's threads abort a process at its very end now and then ("terminate called without an active
    exception"), and with it the launcher's whole run; that must not cost the rounds before.
    """
    try:
        return {**_run(contender), "attempts": 1}
    except fresh.RunFailedError as error:
        print(error, file=sys.stderr)
        return {**_run(contender), "attempts": 2}


def describe(contender: Contender) -> dict[str, Any]:
    """Return what the file says of a contender."""
    return {
        "key": contender.key,
        "label": contender.label,
        "malloc": contender.malloc,
        **contender.job,
    }


def summary_line(contender: Contender, runs: list[dict[str, Any]]) -> str:
    """Return a contender's line for the terminal."""
    speeds = summarise([run["examples_per_s"] for run in runs if run["contender"] == contender.key])
    spread = f"({speeds.least:.1f} to {speeds.most:.1f})"
    return f"{contender.network:9} {contender.label:48} {speeds.median:9.1f} examples/s {spread}"


def _run(contender: Contender) -> dict[str, Any]:
    return fresh.run_module(
        contender.module,
        contender.job,
        launcher=contender.launcher,
        variables=contender.variables,
    )


def _shortened(contender: Contender, options: argparse.Namespace) -> Contender:
    if options.steps is None:
        return contender
    return dataclasses.replace(contender, job={**contender.job, "steps": options.steps})


if __name__ == "__main__":
    main()
