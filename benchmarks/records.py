"""Result files: what was run, where, how, and every repetition; medians are taken by readers."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


class Record:
    """A result file that grows by one run at a time.

    Attributes:
        document: what the file holds: benchmark, command, machine, settings, runs, and more.
    """

    def __init__(self, benchmark: str, out: Path, **fields: Any) -> None:
        self.out = out
        self.document: dict[str, Any] = {
            "benchmark": benchmark,
            "command": command_line(sys.argv),
            "machine": machine.facts(),
            **fields,
            "runs": [],
        }

    def add(self, run: dict[str, Any]) -> None:
        """Note a run, and write the file: what is measured isn't lost if a later run fails."""
        self.document["runs"].append(run)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.document, indent=1) + "\n")


def command_line(argv: Sequence[str]) -> str:
    """Return the command that `argv` is, as typed in the root of the repository."""
    return shlex.join(["python", *map(_without_place, argv)])


def load(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """Return the result file of benchmark `name`; None if there is none."""
    file = folder / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else None


def _without_place(argument: str) -> str:
    """Strip from a path what only this machine has: the place of the repository."""
    if not argument.startswith("/") and not argument.endswith(".py"):
        return argument
    path = Path(argument).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
