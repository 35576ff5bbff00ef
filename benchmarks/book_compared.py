"""Compares the book's ResNet-18 on one device and on two, and takes away what differs.

    python benchmarks/book_compared.py DATA_DIR

DATA_DIR holds Fashion-MNIST. Each row gives both runs the remedy of the row before, too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmark import RESULTS, ROOT, command_line
from evenstep.bench import Record

SCRIPT = "examples/book_resnet18.py"
TWO = ("torchrun", "--nproc-per-node", "2")
SEED, BATCH = ("--seed", "0"), ("--batch-size", "512", "--lr", "0.2")
ROWS: Sequence[tuple[str, Sequence[str], tuple[Sequence[str], Sequence[str]]]] = (
    ("as in the book", (), ((), TWO)),
    ("the same seed", SEED, ((), TWO)),
    ("the same batch and rate, too", (*SEED, *BATCH), ((), TWO)),
    ("`GroupNorm` for `BatchNorm`, too", (*SEED, *BATCH, "--norm", "group"), ((), TWO)),
    (
        "the book's network again, by evenstep's trainer",
        (*SEED, *BATCH),
        (("--evenstep", "1"), ("--evenstep", "2")),
    ),
)
"""What both runs have, the options for it, and what only one of them has: a launcher, options."""


def main() -> None:
    """Record and compare each pair, and write what was said."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    given = parser.parse_args()
    out = RESULTS / "book_compared.json"
    result = Record("book_compared", command_line(["book_compared.py", "DATA_DIR"]), out)
    with tempfile.TemporaryDirectory() as folder:
        for place, (title, options, runs) in enumerate(ROWS):
            records = [Path(folder, f"{name}-{place}.rec") for name in ("one", "two")]
            commands = [command_of(options, run) for run in runs]
            for path, command in zip(records, commands, strict=True):
                data = ("--data-dir", str(given.data.resolve()))
                run("record", "--out", str(path), "--steps", "2", *command, *data)
            said = run("compare", *map(str, records))
            lines = [line.replace(f"{folder}/", "").replace(f"-{place}", "") for line in said]
            print("\n".join([title, *lines]), flush=True)
            commands = [" ".join(one) for one in commands]
            result.add({"round": 0, "title": title, "runs": commands, "output": lines})


def command_of(options: Sequence[str], own: Sequence[str]) -> list[str]:
    """Return the command line of a run: what it has of its own is a launcher, or more options."""
    before, behind = (own, ()) if own == TWO else ((), own)
    return [*before, SCRIPT, *options, *behind]


def run(*arguments: str) -> list[str]:
    """Run evenstep, and return the lines that it writes; 1 says that two runs differ."""
    command = [sys.executable, "-m", "evenstep", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode > 1 or (done.returncode and arguments[0] == "record"):
        raise SystemExit(f"{' '.join(arguments)}:\n{done.stderr}")
    return done.stdout.splitlines()


if __name__ == "__main__":
    main()
