"""Runs the rounds: every contender once per round, in a fresh process, in rotating order."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
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
    module: str  # the module to run; it calls `fresh.answer`
    job: Mapping[str, Any]  # the argument of the module
    # fields that identify its runs in a result file; None for {"contender": key}
    names: Mapping[str, Any] | None = None
    # launching module and its options; () to start the module itself
    launcher: tuple[str, ...] = ()
    # OMP_NUM_THREADS of its processes; None for modules that set threads themselves
    threads: int | None = None
    # further environment variables
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # a package without which the contender is left out; None if it needs none
    needs: str | None = None
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

    def with_steps(self, steps: int) -> Contender:
        """Return the contender with a different number of timed steps."""
        return dataclasses.replace(self, job={**self.job, "steps": steps})


def missing(contenders: Sequence[Contender]) -> list[Contender]:
    """Return the contenders whose package is not installed."""
    return [contender for contender in contenders if not contender.is_installed]


def measure(contender: Contender) -> dict[str, Any]:
    """Run a contender in a fresh process; a second time if it fails, which "attempts" records.

    gloo's threads sometimes abort a process at its very end ("terminate called without an active
    exception"). One such abort must not cost the rounds before it.

    Raises:
        RunFailedError: it failed twice in a row.
    """
    try:
        return {**_run(contender), "attempts": 1}
    except fresh.RunFailedError:
        return {**_run(contender), "attempts": 2}


def run_rounds(
    contenders: Sequence[Contender],
    rounds: int,
    record: Record,
    on_run: Callable[[Run], object] = lambda run: None,
    measure: Callable[[Contender], Mapping[str, Any]] = measure,
) -> None:
    """Run all rounds and record every run; rounds count from those that the record has.

    Args:
        contenders: what is measured.
        rounds: how often each contender is measured.
        record: receives the runs.
        on_run: called with each run, to report progress.
        measure: returns the figures of one contender.

    Raises:
        RunFailedError: a contender failed twice in a row.
    """
    first = record.rounds
    for number in range(first, first + rounds):
        for contender in rotated(contenders, number):
            run = {"round": number, **contender.marks, **measure(contender)}
            record.add(run)
            on_run(run)


def _run(contender: Contender) -> dict[str, Any]:
    return fresh.run_module(
        contender.module,
        dict(contender.job),
        launcher=contender.launcher,
        folder=contender.folder,
        variables=contender.variables,
    )
