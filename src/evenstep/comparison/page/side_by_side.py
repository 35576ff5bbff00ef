"""Two runs side by side, as numbers: update by update, and module by module where they part."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

from evenstep.comparison.aligned import distance, furthest, join_calls
from evenstep.comparison.computed import mean_loss
from evenstep.comparison.data import rows_of
from evenstep.comparison.reading import Kept, Run

_MOST_MODULES = 400


@dataclasses.dataclass(frozen=True)
class Update:
    """One update of both runs.

    Attributes:
        number: its number, from 0.
        examples: how many examples each run had, and how many they have in common.
        losses: the mean of the losses of each run; None without one.
        gradients, weights: how far they are apart at most, relative to their norm.
    """

    number: int
    examples: tuple[int, int, int]
    losses: tuple[float | None, float | None]
    gradients: float
    weights: float


@dataclasses.dataclass(frozen=True)
class Module:
    """The calls of one module in one update.

    Attributes:
        name, kind: its name and class.
        calls: how often it was called in each run.
        inputs, outputs: how far they are apart, relative to their norm; 0 for the same bits, and
            None where they can't be compared.
        norms: of the first output in each run.
    """

    name: str
    kind: str
    calls: tuple[int, int]
    inputs: float | None
    outputs: float | None
    norms: tuple[float | None, float | None]


def updates_of(ours: Run, theirs: Run) -> list[Update]:
    """Return all updates that both runs have."""
    return [_update(ours, theirs, number) for number in range(min(ours.steps, theirs.steps))]


def _update(ours: Run, theirs: Run, number: int) -> Update:
    mine, its = Counter(rows_of(ours, number)), Counter(rows_of(theirs, number))
    return Update(
        number,
        (mine.total(), its.total(), (mine & its).total()),
        (_loss(ours, number), _loss(theirs, number)),
        furthest(ours.seen(number), theirs.seen(number))[1],
        furthest(ours.weights(number), theirs.weights(number))[1],
    )


def _loss(run: Run, number: int) -> float | None:
    steps = run.step(number)
    return mean_loss(steps) if any(step.losses for step in steps) else None


def modules_of(ours: Run, theirs: Run, number: int) -> list[Module]:
    """Return the modules that both runs call in an update, in the order of their outputs."""
    mine, its = join_calls(ours.step(number)), join_calls(theirs.step(number))
    found = []
    for name in [name for name in mine if name in its][:_MOST_MODULES]:
        one, other = mine[name], its[name]
        found.append(
            Module(
                name or "the model",
                one.kind,
                (one.calls, other.calls),
                _apart(one.inputs, other.inputs),
                _apart(one.outputs, other.outputs),
                (_norm(one.outputs), _norm(other.outputs)),
            )
        )
    return found


def _apart(ours: list[Kept], theirs: list[Kept]) -> float | None:
    if not ours or len(ours) != len(theirs):
        return None
    far = [*map(distance, ours, theirs)]
    return max(far) if all(map(math.isfinite, far)) else None


def _norm(tensors: list[Kept]) -> float | None:
    squares = tensors[0].squares if tensors else None
    return None if squares is None else math.sqrt(squares)
