"""Figures kept in a file as they are measured, so that a run can be interrupted and goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from evenstep.bench import machine
from evenstep.book.reproduce.plan import Experiment, Part, Size, Workplace
from evenstep.errors import InputError, SaveError
from evenstep.files import write_file


class Kept:
    """The file of figures.

    Args:
        file: made when there is something to keep.
        size: "quick" or "full"; figures of the one are not taken for the other.

    Attributes:
        document: what the file holds: size, machine, the figures of each part, and under
            "went_on" when and at which revision later runs went on with it.

    Raises:
        InputError: the file is of the other size, or no file of ours.
    """

    def __init__(self, file: Path, size: Size) -> None:
        self._file = file
        self._facts = machine.facts()
        self.document: dict[str, Any] = {"size": size, "machine": self._facts, "parts": {}}
        if file.exists():
            self.document = _read(file, size)

    @property
    def figures(self) -> dict[str, Mapping[str, Any]]:
        """What was measured so far, by part."""
        found: dict[str, Mapping[str, Any]] = self.document["parts"]
        return found

    @property
    def _went_on(self) -> list[dict[str, Any]]:
        """The earlier runs that went on, without this one."""
        before: list[dict[str, Any]] = self.document.get("went_on", [])
        return [one for one in before if one["date_utc"] != self._facts["date_utc"]]

    def keep(self, part: Part, figures: Mapping[str, Any]) -> None:
        """Note what a part gave, and write the file.

        Raises:
            SaveError: it can't be written.
        """
        self.document["parts"][part.key] = figures
        if self._facts != self.document["machine"]:
            now = {name: self._facts[name] for name in ("date_utc", "git_revision")}
            self.document["went_on"] = [*self._went_on, now]
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._file, json.dumps(self.document, indent=1) + "\n")
        except OSError as error:
            raise SaveError(f"{self._file} can't be written: {error.strerror or error}") from error


def run(
    experiments: Iterable[Experiment],
    kept: Kept,
    place: Workplace,
    done: Callable[[Experiment], object] = lambda experiment: None,
) -> None:
    """Measure every part that has no figures yet, in order.

    Args:
        experiments: whose parts.
        kept: the figures.
        place: where parts are measured.
        done: called with each experiment whose parts all have figures.
    """
    for experiment in experiments:
        for part in experiment.missing(kept.figures):
            place.tell(f"{experiment.name}: {part.label}")
            kept.keep(part, part.measure(place))
            shutil.rmtree(place.folder / part.key, ignore_errors=True)
        done(experiment)


def _read(file: Path, size: Size) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        other = found["size"]
        found["parts"].keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{file} is no file of figures that evenstep reproduce has written ({error}): give "
            f"another folder"
        ) from error
    if other != size:
        raise InputError(
            f"{file} has the figures of a {other} run, which a {size} run can't go on from: give "
            f"another folder"
        )
    return found
