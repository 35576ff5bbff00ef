"""Runs the rounds: every contender once per round, in a fresh process, in rotating order."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep.bench import fresh
from evenstep.bench.results import Record
from evenstep.bench.rounds import Run, rotated, select


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One thing that a benchmark measures."""

    key: str  # unique name within the benchmark
    label: str = ""  # name in tables
    module: str  # the module whose `measure` is called in a fresh process
    job: Mapping[str, Any]  # the argument of `measure`
    # fields that identify its runs in a result file; None for {"contender": key}
    names: Mapping[str, Any] | None = None
    launcher: tuple[str, ...] = ()  # a launching module and its options
    threads: int | None = None  # OMP_NUM_THREADS; None for modules that set threads themselves
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)  # more variables
    needs: str | None = None  # a package without which the contender is left out
    folder: Path | None = None  # the working directory; None for the current one

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that are added for its processes."""
        threads = {} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}
        return {**threads, **self.environment}

    @property
    def marks(self) -> Mapping[str, Any]:
        """The fields that identify its runs in a result file."""
        return {"contender": self.key} if self.names is None else self.names

    def runs(self, document: Mapping[str, Any]) -> list[Run]:
        """Return its runs in a result file."""
        return select(document["runs"], **self.marks)

    @property
    def is_installed(self) -> bool:
        """Whether the package that it needs is installed."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    def described(self) -> dict[str, Any]:
        """Return its description for a result file."""
        more = {"environment": dict(self.environment)} if self.environment else {}
        return {"key": self.key, "label": self.label, **more, **self.job}


def installed(contenders: Sequence[Contender], say: Callable[[str], object]) -> list[Contender]:
    """Return the contenders whose packages are installed, and say which are left out."""
    for one in contenders:
        if not one.is_installed:
            say(f"left out: {one.label} ({one.needs} is not installed)")
    return [one for one in contenders if one.is_installed]


def measure(contender: Contender) -> dict[str, Any]:
    """Run a contender in a fresh process; a second time if it fails, which "attempts" records.

    gloo's threads sometimes abort a process at its very end ("terminate called without an active
    exception"). One such abort must not cost the rounds before it.

    Raises:
        RunFailedError: it failed twice in a row.
    """

    def run() -> dict[str, Any]:
        return fresh.run_module(
            contender.module,
            contender.job,
            launcher=contender.launcher,
            folder=contender.folder,
            variables=contender.variables,
        )

    try:
        return {**run(), "attempts": 1}
    except fresh.RunFailedError:
        return {**run(), "attempts": 2}


def run_rounds(
    contenders: Sequence[Contender],
    rounds: int,
    record: Record,
    on_run: Callable[[Run], object] = lambda run: None,
    measure: Callable[[Contender], Mapping[str, Any]] = measure,
    predict: Callable[[Sequence[Contender]], Iterable[Run]] = lambda contenders: (),
) -> None:
    """Measure each contender once in each round, and record every run.

    Rounds count from those that the record has. `on_run` is called with each run. What `predict`
    returns for the contenders of a round is recorded before the first of them runs.

    Raises:
        RunFailedError: a contender failed twice in a row.
    """
    for number in range(record.rounds, record.rounds + rounds):
        for prediction in predict(contenders):
            record.add({"round": number, **prediction}, to="predictions")
        for contender in rotated(contenders, number):
            run = {"round": number, **contender.marks, **measure(contender)}
            record.add(run)
            on_run(run)
