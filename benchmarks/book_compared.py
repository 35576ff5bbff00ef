"""Compares the book's ResNet-18 on one device and on two, and takes away what differs.

    python benchmarks/book_compared.py DATA_DIR

DATA_DIR holds Fashion-MNIST. Each row gives both runs the remedy of the row before, too.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmark import RESULTS, ROOT, command_line
from evenstep.bench import Record
from public_scripts import compare, record

SCRIPT = "examples/book_resnet18.py"
ONE_AND_TWO = (SCRIPT, f"torchrun --nproc-per-node 2 {SCRIPT}")
SAME = "--seed 0 --batch-size 512 --lr 0.2"
ROWS = (
    ("as in the book", ONE_AND_TWO, ""),
    ("the same seed", ONE_AND_TWO, "--seed 0"),
    ("the same batch and rate, too", ONE_AND_TWO, SAME),
    ("`GroupNorm` for `BatchNorm`, too", ONE_AND_TWO, f"{SAME} --norm group"),
    (
        "the book's network again, by evenstep's trainer",
        (SCRIPT, SCRIPT),
        (f"{SAME} --evenstep 1", f"{SAME} --evenstep 2"),
    ),
)
"""What both runs have, how each begins, and their options."""


def main() -> None:
    """Record two updates of each run of a pair, compare them, and write what was said."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    data = parser.parse_args().data.resolve()
    out = RESULTS / "book_compared.json"
    result = Record("book_compared", command_line(["book_compared.py", "DATA_DIR"]), out)
    for title, begins, given in ROWS:
        print(title, flush=True)
        options = (given, given) if isinstance(given, str) else given
        commands = [f"{one} {two}".strip() for one, two in zip(begins, options, strict=True)]
        with tempfile.TemporaryDirectory() as folder:
            records = [Path(folder, f"{name}.rec") for name in ("one", "two")]
            for path, command in zip(records, commands, strict=True):
                record(f"{command} --data-dir {data}", path, ROOT, updates=2)
            exit_code, lines = compare(records, [path.name for path in records])
        if exit_code > 1:
            raise SystemExit(f"{title}: the runs could not be compared")
        result.add({"round": 0, "title": title, "runs": commands, "output": lines})


if __name__ == "__main__":
    main()
