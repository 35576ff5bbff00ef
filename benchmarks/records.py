"""Where the result files of this repository lie, and the commands that write them."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenstep.bench import Record as _Record

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


class Record(_Record):
    """A result file that names the script which is running."""

    def __init__(self, benchmark: str, out: Path, **fields: Any) -> None:
        super().__init__(benchmark, command_line(sys.argv), out, **fields)


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
