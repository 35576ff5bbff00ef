"""Finds the first place where two recorded runs part."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from evenstep.comparison.aligned import first_that_differs, furthest, rounding_of, with_common_names
from evenstep.comparison.computed import find_other_losses, find_other_modes, find_other_outputs
from evenstep.comparison.data import find_other_data
from evenstep.comparison.finding import HARMLESS, Cause, Finding, because
from evenstep.comparison.later import (
    find_jump_of_losses,
    find_jump_of_outputs,
    find_jump_of_weights,
    find_new_changes,
    find_new_clipping,
    find_new_draws,
)
from evenstep.comparison.reading import Run, read_run
from evenstep.comparison.updated import (
    find_changed_weights,
    find_not_exchanged,
    find_other_gradients,
    find_other_optimizer,
    find_other_settings,
    find_other_update,
    find_skipped,
    first_that_rounds,
)
from evenstep.comparison.values import spell_values
from evenstep.errors import counted

_Search: TypeAlias = Callable[[Run, Run, int], Finding | None]

_LATER: tuple[_Search, ...] = (
    find_other_optimizer,
    find_other_data,
    find_new_changes,
    find_other_modes,
    find_new_draws,
    find_jump_of_outputs,
    find_jump_of_losses,
    find_skipped,
    find_not_exchanged,
    find_new_clipping,
    find_other_settings,
    find_jump_of_weights,
)
"""What is looked for in the updates behind the first that rounds."""

_SEARCHES: tuple[_Search, ...] = (
    find_other_optimizer,
    find_other_data,
    find_changed_weights,
    find_other_modes,
    find_other_outputs,
    find_other_losses,
    find_skipped,
    find_not_exchanged,
    find_other_gradients,
    find_other_settings,
    find_other_update,
)
"""In the order in which a step is computed: each may take what those before found to be equal."""


def compare(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> Finding:
    """Return why two recorded runs differ, and where they begin to.

        finding = evenstep.compare("one.rec", "two.rec")
        finding.cause.value     # "several processes train on the same examples"

    They may have other numbers of processes: examples, not processes, are compared.

    Args:
        one: a folder that `evenstep record` or `evenstep.record` has written.
        other: another one.

    Raises:
        InputError: one of them is no record, or damaged.
    """
    return find_cause(read_run(Path(one)), read_run(Path(other)))


def find_cause(ours: Run, theirs: Run) -> Finding:
    """Return why two runs differ.

    Differences by rounding are passed over, unless nothing else differs: behind the first, only
    what rounding does not explain counts.
    """
    ours, theirs = with_common_names(ours, theirs)
    finding = _find(ours, theirs)
    follows = (*finding.follows, *_not_finite(ours), *_not_finite(theirs))
    return dataclasses.replace(finding, follows=follows)


def _not_finite(run: Run) -> Iterator[str]:
    """Yield from which update on a weight is no number any more."""
    for number in range(run.steps):
        for name, kept in run.weights(number).items():
            if kept.nans or not math.isfinite(kept.squares or 0.0):
                yield f"{name} of {run.name} holds NaN or infinity from update {number} on"
                return


def _find(ours: Run, theirs: Run) -> Finding:
    found = _weights(ours, theirs)
    if found is not None:
        return found
    rounds: Finding | None = None
    steps = min(ours.steps, theirs.steps)
    for number in range(steps):
        for search in _SEARCHES if rounds is None else _LATER:
            finding = search(ours, theirs, number)
            if finding is not None and finding.cause not in HARMLESS:
                return _with_what_follows(finding, ours, theirs)
            rounds = rounds or finding
        if rounds is None and (tensor := first_that_rounds(ours, theirs, number)) is not None:
            seen = f"{tensor} differs in its last bits, and nothing before it"
            rounds = because(Cause.SUM, number, seen, place=tensor.split()[-1])
    longer = _length(ours, theirs)
    if longer is not None:
        return longer
    if rounds is not None:
        return _with_growth(rounds, ours, theirs)
    evidence = [f"{counted(steps, 'update')} of {ours.name} and {theirs.name} are the same"]
    if ours.steps != theirs.steps:
        evidence.append(f"{ours.name} has {ours.steps} updates, {theirs.name} {theirs.steps}")
    return Finding(Cause.NOTHING, None, tuple(evidence))


def _length(ours: Run, theirs: Run) -> Finding | None:
    """Return that one run ended earlier, and neither because its record did."""
    shorter, longer = sorted((ours, theirs), key=lambda run: run.steps)
    if shorter.steps == longer.steps:
        return None
    if not all(one.is_whole and shorter.steps < one.most_steps for one in shorter.processes):
        return None
    return because(
        Cause.LENGTH,
        shorter.steps,
        f"{shorter.name} ends after {counted(shorter.steps, 'update')}, {longer.name} has "
        f"{longer.steps}; the updates before are the same, or differ by rounding only",
        remedy="train both for as many updates: look at epochs, and at the length of the data",
    )


def _weights(ours: Run, theirs: Run) -> Finding | None:
    mine, its = ours.processes[0].weights, theirs.processes[0].weights
    missing = sorted(mine.keys() ^ its.keys())
    if missing:
        run = ours if missing[0] in mine else theirs
        seen = f"{missing[0]} is a parameter in {run.name} only"
        return because(Cause.WEIGHTS, None, seen, remedy="compare runs of one model")
    name = first_that_differs(mine, its)
    if name is None:
        return None
    if mine[name].dtype != its[name].dtype:
        dtypes = f"{mine[name].dtype} in {ours.name}, {its[name].dtype} in {theirs.name}"
        remedy = "train both in the same precision"
        return because(Cause.PRECISION, None, f"the dtype of {name} is {dtypes}", remedy=remedy)
    return because(
        Cause.WEIGHTS,
        None,
        f"{name} differs before the first update",
        remedy="call torch.manual_seed before the model is built, or load one checkpoint in both",
    )


def _with_what_follows(finding: Finding, ours: Run, theirs: Run) -> Finding:
    if finding.step is not None:
        values = spell_values(ours, theirs, finding.step, finding.place)
        finding = dataclasses.replace(finding, evidence=(*finding.evidence, *values))
    last = min(ours.steps, theirs.steps) - 1
    name, far = furthest(ours.weights(last), theirs.weights(last))
    if not far:
        return finding
    line = f"after update {last}, {name} differs by {far:.1e} of its size"
    return dataclasses.replace(finding, follows=(line,))


def _with_growth(finding: Finding, ours: Run, theirs: Run) -> Finding:
    values = spell_values(ours, theirs, finding.step or 0, finding.place)
    finding = dataclasses.replace(finding, evidence=(*finding.evidence, *values))
    last = min(ours.steps, theirs.steps) - 1
    first = finding.step or 0
    apart = [furthest(ours.weights(number), theirs.weights(number))[1] for number in (first, last)]
    grows = f"weights are {apart[0]:.1e} apart after update {first}, {apart[1]:.1e} after {last}"
    remedy = ""
    if apart[1] > rounding_of(ours.step(last)):
        remedy = (
            "rounding grows as training goes on, in every run: train with evenstep for the same "
            "bits on any number of devices, or compare means over several seeds"
        )
    return dataclasses.replace(finding, follows=(grows,), remedy=remedy)
