"""Result files: what was run, where, how, and every repetition; medians are taken by readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evenstep.bench import machine
from evenstep.files import write_file


class Record:
    """The results of a benchmark; as a file, too, that grows by one run at a time.

    Args:
        benchmark: its name.
        command: that it was started with.
        out: the file; None for none.
        fields: more that is to stand in it.

    Attributes:
        document: what the file holds: benchmark, command, machine, runs, and more.
    """

    def __init__(self, benchmark: str, command: str, out: Path | None, **fields: Any) -> None:
        self._out = out
        self.document: dict[str, Any] = {
            "benchmark": benchmark,
            "command": command,
            "machine": machine.facts(),
            **fields,
            "runs": [],
        }

    def add(self, run: dict[str, Any]) -> None:
        """Note a run, and write the file: what is measured isn't lost if a later run fails."""
        self.document["runs"].append(run)
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._out, json.dumps(self.document, indent=1) + "\n")
