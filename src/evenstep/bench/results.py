"""Result files: machine, settings and every single run. Readers take the medians."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evenstep.bench import machine
from evenstep.errors import SaveError
from evenstep.files import write_file


class Record:
    """The results of a benchmark, written to a file after each run.

    Args:
        benchmark: name of the benchmark.
        command: the command that measures it.
        out: the file; None to keep the results in memory only.
        fields: further fields of the document.

    Attributes:
        document: content of the file: benchmark, command, machine, further fields, runs; and as
            "went_on" the dates and revisions of later commands that added runs.
    """

    def __init__(self, benchmark: str, command: str, out: Path | None, **fields: Any) -> None:
        self._out = out
        begin = {"benchmark": benchmark, "command": command, "machine": machine.facts()}
        self.document: dict[str, Any] = {**begin, **fields, "runs": []}

    @property
    def rounds(self) -> int:
        """The number of rounds that have runs."""
        return max((run["round"] + 1 for run in self.document["runs"]), default=0)

    def go_on(self, earlier: Mapping[str, Any]) -> None:
        """Add the runs to those of an earlier document, with its settings."""
        facts = self.document["machine"]
        self.document = {**earlier, "runs": [*earlier["runs"]]}
        note_later(self.document, facts)

    def add(self, run: Mapping[str, Any], to: str = "runs") -> None:
        """Add a run, or what `to` says, and write the file, so that a failure loses nothing."""
        self.document[to] = [*self.document.get(to, ()), run]
        if self._out is not None:
            write(self._out, self.document)


def note_later(document: dict[str, Any], facts: Mapping[str, Any]) -> None:
    """Note in a document that runs were added to it later: when, and at which revision."""
    now = {name: facts[name] for name in ("date_utc", "git_revision")}
    before = document.get("went_on", [])
    document["went_on"] = [*(one for one in before if one["date_utc"] != now["date_utc"]), now]


def write(file: Path, document: Mapping[str, Any]) -> None:
    """Write a result file as `write_text` does."""
    write_text(file, json.dumps(document, indent=1) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write a text file atomically, and create its folder.

    Raises:
        SaveError: the file can't be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, text)
    except OSError as error:
        raise SaveError(f"{file} can't be written: {error.strerror or error}") from error


def load(file: Path) -> dict[str, Any]:
    """Return the document in a result file.

    Raises:
        ValueError: the content is not a JSON object.
    """
    document = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError(f"expected a JSON object, got {type(document).__name__}")
    return document
