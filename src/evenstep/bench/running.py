"""The rounds: every contender once a round, in a fresh process, in an order that rotates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evenstep.bench import fresh
from evenstep.bench.lineup import Contender, devices
from evenstep.bench.results import Record
from evenstep.bench.rounds import rotated

Run = Mapping[str, Any]


def missing(contenders: Sequence[Contender]) -> list[Contender]:
    """Return those whose package is not installed."""
    return [contender for contender in contenders if not contender.is_there]


def run_rounds(
    contenders: Sequence[Contender],
    rounds: int,
    record: Record,
    heard: Callable[[Run], object] = lambda run: None,
) -> None:
    """Run all rounds, and note every run.

    Args:
        contenders: who runs.
        rounds: how often each.
        record: takes the runs.
        heard: is told of each, too.

    Raises:
        RunFailedError: a contender failed twice in a row.
    """
    for number in range(rounds):
        for contender in rotated(contenders, number):
            run = {"contender": contender.key, "round": number, **measure(contender)}
            record.add(run)
            heard(run)


def measure(contender: Contender) -> dict[str, Any]:
    """Run a contender in a fresh process; once more if it fails, which the file then says.

    gloo's threads abort a process at its very end now and then ("terminate called without an active
    exception"), and with it the launcher's whole run; that must not cost the rounds before.
    """
    try:
        return {**_run(contender), "attempts": 1}
    except fresh.RunFailedError:
        return {**_run(contender), "attempts": 2}


def steps_for(job: Mapping[str, Any], workers: int, seconds: float) -> int:
    """Return how many steps of a job take about so long on evenstep; measured with a few."""
    trial = devices({**job, "warmup_steps": 1, "steps": 3}, workers)
    taken: float = measure(trial)["seconds"] / trial.job["steps"]
    return max(3, math.ceil(seconds / taken))


def _run(contender: Contender) -> dict[str, Any]:
    return fresh.run_module(
        contender.module,
        dict(contender.job),
        launcher=contender.launcher,
        variables=contender.variables,
    )


def shortened(contender: Contender, steps: int) -> Contender:
    """Return the contender with another number of timed steps."""
    return dataclasses.replace(contender, job={**contender.job, "steps": steps})
