"""Keeps figures in a file as they are measured, so that an interrupted run can resume."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from evenstep.bench import machine, results
from evenstep.errors import InputError
from evenstep.reproduce.plan import Experiment, Part, Size, Workplace


class Kept:
    """The file of figures, created with the first of them.

    Figures of the two sizes are never mixed.

    Attributes:
        document: content of the file: "size", "machine", the figures of each part as "parts", and
            as "went_on" the dates and revisions of later runs that resumed.

    Raises:
        InputError: the file has a different size, or was not written by `evenstep reproduce`.
    """

    def __init__(self, file: Path, size: Size) -> None:
        self._file, self._facts = file, machine.facts()
        self.document: dict[str, Any] = {"size": size, "machine": self._facts, "parts": {}}
        if file.exists():
            self.document = _read(file, size)

    @property
    def figures(self) -> dict[str, Mapping[str, Any]]:
        """The figures measured so far, by part."""
        found: dict[str, Mapping[str, Any]] = self.document["parts"]
        return found

    def keep(self, part: Part, figures: Mapping[str, Any]) -> None:
        """Record the figures of a part and write the file.

        Raises:
            SaveError: the file can't be written.
        """
        self.document["parts"][part.key] = figures
        if self._facts != self.document["machine"]:
            results.note_later(self.document, self._facts)
        results.write(self._file, self.document)


def run(
    experiments: Iterable[Experiment],
    kept: Kept,
    place: Workplace,
    on_done: Callable[[Experiment], object] = lambda experiment: None,
) -> None:
    """Measure, in order, every part that has no figures yet.

    `on_done` is called with each experiment once all its parts have figures.
    """
    for experiment in experiments:
        for part in experiment.missing(kept.figures):
            place.say(f"{experiment.name}: {part.label}")
            kept.keep(part, part.measure(place))
            shutil.rmtree(place.folder / part.key, ignore_errors=True)
        on_done(experiment)


def _read(file: Path, size: Size) -> dict[str, Any]:
    try:
        found = results.load(file)
        other = found["size"]
        found["parts"].keys()
    except (OSError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{file} is not a file of figures written by evenstep reproduce ({error}): choose "
            f"a different folder"
        ) from error
    if other != size:
        raise InputError(
            f"{file} has figures of a {other} run, which a {size} run can't resume: choose a "
            f"different folder"
        )
    return found
