"""Brings what several processes did for one update together, so that two runs can be compared."""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from evenstep.comparison.reading import Call, Kept, ProcessStep, Run

ROWS_MODULUS = 1 << 64

_ROUNDING = {"bfloat16": 2e-2, "float16": 3e-3}
_ROUNDING_OF_OTHERS = 1e-4

_SMALL = 1e-3
"""The part of the largest norm below which a tensor's own norm says nothing."""


@dataclasses.dataclass(frozen=True)
class Joined:
    """All calls of one module for one update, in all processes.

    Attributes:
        module: its name.
        kind: its class.
        calls: how often it was called.
        trains: whether it was in training mode in any call.
        drew: digests of the random numbers that were drawn, in the order of the digests.
        autocast: of the model itself: the dtype of autocast; None for none.
        inputs, outputs: its tensors, by their places, added up over the calls.
    """

    module: str
    kind: str
    calls: int
    trains: bool
    drew: tuple[str, ...]
    autocast: str | None
    inputs: list[Kept]
    outputs: list[Kept]


def join_calls(steps: Sequence[ProcessStep]) -> dict[str, Joined]:
    """Return the calls of each module of all processes together, in the order of the first."""
    found: dict[str, list[Call]] = {}
    for step in steps:
        for call in step.calls:
            if call.module or call.examples is not None:
                found.setdefault(call.module, []).append(call)
    return {name: _join(name, calls) for name, calls in found.items()}


def _join(name: str, calls: Sequence[Call]) -> Joined:
    return Joined(
        name,
        calls[0].kind,
        len(calls),
        any(call.trains for call in calls),
        tuple(sorted(call.drew for call in calls if call.drew)),
        calls[0].autocast,
        _added([call.inputs for call in calls]),
        _added([call.outputs for call in calls]),
    )


def _added(every: Sequence[Sequence[Kept]]) -> list[Kept]:
    """Add what was kept of tensors at the same place; where calls have other places, of none."""
    if len({len(tensors) for tensors in every}) != 1:
        return []
    return [_sum_of(tensors) for tensors in zip(*every, strict=True)]


def _sum_of(tensors: Sequence[Kept]) -> Kept:
    if len(tensors) == 1:
        return tensors[0]
    rows = [one.rows for one in tensors]
    shape = tensors[0].shape
    known = [one for one in tensors if one.picked is not None]
    picked = min(known, key=lambda one: one.picked or 0, default=None)
    if all(row is not None for row in rows):
        shape = (sum(one.shape[0] for one in tensors), *shape[1:])
    return Kept(
        None,
        None if None in rows else sum(row for row in rows if row is not None) % ROWS_MODULUS,
        shape,
        tensors[0].dtype,
        _added_up([one.total for one in tensors]),
        _added_up([one.squares for one in tensors]),
        max((one.largest or 0.0 for one in tensors), default=None),
        sum(one.nans or 0 for one in tensors),
        picked=None if picked is None else picked.picked,
        sample=() if picked is None else picked.sample,
    )


def _added_up(values: Sequence[float | None]) -> float | None:
    return None if None in values else math.fsum(value for value in values if value is not None)


# ---- names


def with_common_names(ours: Run, theirs: Run) -> tuple[Run, Run]:
    """Return two runs of one model in which its tensors have the same names.

    They have others where the outermost module that was called holds the model in one run: without
    DistributedDataParallel, Lightning calls a method of the module that holds the model.
    """
    names = [run.processes[0].weights for run in (ours, theirs)]
    if names[0].keys() != names[1].keys():
        if places := _places_of(names[0], names[1]):
            return ours, _renamed(theirs, places)
        if places := _places_of(names[1], names[0]):
            return _renamed(ours, places), theirs
    return ours, theirs


def _places_of(names: Iterable[str], longer: Collection[str]) -> dict[str, str]:
    """Return where longer names hold the models of shorter ones: {"model.": "", ...}."""
    models: dict[str, list[str]] = {}
    for name in names:
        model, _, bare = name.rpartition(": ")
        models.setdefault(model, []).append(bare)
    places: dict[str, str] = {}
    for model, held in models.items():
        ends = [one.removesuffix(held[0]) for one in longer if one.endswith(held[0])]
        found = [end for end in ends if all(end + one in longer for one in held)]
        new = next((end for end in found if end not in places), None)
        if new is None:
            return {}
        places[new] = f"{model}: " if model else ""
    return places


def _renamed(run: Run, places: Mapping[str, str]) -> Run:
    def named(name: str) -> str:
        for long, short in places.items():
            if name.startswith(long):
                return short + name.removeprefix(long)
        return name

    def all_named(found: Mapping[str, Any]) -> dict[str, Any]:
        return {named(name): one for name, one in found.items()}

    def call_named(call: Call) -> Call:
        base, *more = re.split(r"(?= \(call | > )", call.module, maxsplit=1)
        whole = {long.rstrip(".: "): short.rstrip(": ") for long, short in places.items() if long}
        if base in whole:
            more = [one for one in more if not one.startswith(" (call ")]
        module = "".join((whole.get(base, named(base)), *more))
        return dataclasses.replace(call, module=module)

    def calls_named(step: ProcessStep) -> list[Call]:
        inner = [call_named(call) for call in step.calls if not call.is_whole]
        return inner if any(call.is_whole for call in inner) else step.calls

    def step_named(step: ProcessStep) -> ProcessStep:
        by_name: dict[str, Any] = {name: all_named(getattr(step, name)) for name in _BY_NAME}
        held = [*map(named, step.held)]
        return dataclasses.replace(step, calls=calls_named(step), held=held, **by_name)

    return Run(
        run.name,
        [
            dataclasses.replace(
                process,
                weights=all_named(process.weights),
                buffers=all_named(process.buffers),
                settings=all_named(process.settings),
                frozen=[*map(named, process.frozen)],
                steps=[*map(step_named, process.steps)],
            )
            for process in run.processes
        ],
    )


_BY_NAME = ("local", "exchanged", "seen", "changed", "values", "weights", "buffers")
"""What a step keeps by the names of tensors."""


# ---- how far apart


def rounding_of(steps: Sequence[ProcessStep]) -> float:
    """Return the largest relative difference that counts as rounding in a step.

    It follows from the coarsest dtype of what modules give.
    """
    dtypes = {one.dtype for step in steps for call in step.calls for one in call.outputs}
    return max(
        (_ROUNDING.get(one, _ROUNDING_OF_OTHERS) for one in dtypes), default=_ROUNDING_OF_OTHERS
    )


def same(one: Kept, other: Kept) -> bool:
    """Return whether two tensors have the same bits, or the same rows in any order."""
    if one.rows is not None and other.rows is not None:
        return one.rows == other.rows and one.shape == other.shape and one.dtype == other.dtype
    return one.digest is not None and one.digest == other.digest


def first_that_differs(one: Mapping[str, Kept], other: Mapping[str, Kept]) -> str | None:
    """Return the name of the first tensor whose bits are known to differ; None if none are."""
    digests = ((name, one[name].digest, other[name].digest) for name in one if name in other)
    return next((name for name, mine, its in digests if mine and its and mine != its), None)


def distance(one: Kept, other: Kept, least: float = 0.0) -> float:
    """Return how far two tensors are apart, relative to their norm, estimated.

    By the difference of their sketches; of tensors with examples by that of their norms, of their
    sums, and of some values of one example, which are kept of what a module gives for the same
    inputs. Infinity if they can't be equal. A smaller norm counts as `least`.
    """
    if one.shape != other.shape:
        return math.inf
    if same(one, other):
        return 0.0
    if one.total is None or other.total is None:
        return math.inf
    mine = other.squares if one.squares is None else one.squares
    its = one.squares if other.squares is None else other.squares
    if mine is None or its is None:  # of neither is more known than its sum
        return 0.0
    norms = math.sqrt(mine), math.sqrt(its)
    size = max(*norms, least)
    if not all(map(math.isfinite, (*norms, one.total, other.total))):
        return 0.0 if one.nans == other.nans else math.inf
    if size == 0.0:
        return 0.0
    if one.sketch and other.sketch and len(one.sketch) == len(other.sketch):
        return math.dist(one.sketch, other.sketch) / math.sqrt(len(one.sketch)) / size
    by_sum = abs(one.total - other.total) / (size * math.sqrt(max(one.elements, 1)))
    by_norm = abs(norms[0] - norms[1]) / size
    return max(by_norm, by_sum, _by_sample(one, other, size / math.sqrt(max(one.elements, 1))))


def _by_sample(one: Kept, other: Kept, usual: float) -> float:
    """Return how far samples of the same example are apart, relative to the usual values."""
    values = one.sample, other.sample
    if one.picked is None or one.picked != other.picked or len(values[0]) != len(values[1]):
        return 0.0
    if not all(map(math.isfinite, (*values[0], *values[1]))):
        return 0.0
    size = max(math.hypot(*values[0]), math.hypot(*values[1]), usual * math.sqrt(len(values[0])))
    return math.dist(*values) / size if size else 0.0


def divided(kept: Kept, scale: float) -> Kept:
    """Return what would have been kept of a tensor divided by a number."""
    if scale == 1.0:
        return kept
    return dataclasses.replace(
        kept,
        digest=None,
        total=None if kept.total is None else kept.total / scale,
        squares=None if kept.squares is None else kept.squares / scale**2,
        largest=None if kept.largest is None else kept.largest / scale,
        sketch=None if kept.sketch is None else tuple(one / scale for one in kept.sketch),
    )


def furthest(one: Mapping[str, Kept], other: Mapping[str, Kept]) -> tuple[str, float]:
    """Return the name of the tensors that are furthest apart, and how far; ("", 0) if none is.

    A gradient that is zero but for rounding (of a bias before a softmax) has no size of its own:
    each counts as at least a small part of the largest.
    """
    found = _distances(one, other)
    name = max(found, key=lambda key: found[key], default="")
    return name, found.get(name, 0.0)


def typical(one: Mapping[str, Kept], other: Mapping[str, Kept]) -> float:
    """Return the median of the distances between tensors of the same names; 0 without any."""
    return statistics.median_low(_distances(one, other).values() or [0.0])


def _distances(one: Mapping[str, Kept], other: Mapping[str, Kept]) -> dict[str, float]:
    least = _SMALL * max((math.sqrt(kept.squares or 0.0) for kept in one.values()), default=0.0)
    least = least if math.isfinite(least) else 0.0
    return {name: distance(one[name], other[name], least) for name in one if name in other}


def scale_between(one: Mapping[str, Kept], other: Mapping[str, Kept]) -> float | None:
    """Return the number by which all tensors of `other` are larger than those of `one`, if any."""
    least = _SMALL**2 * max((kept.squares or 0.0 for kept in one.values()), default=0.0)
    ratios = [
        math.sqrt(theirs.squares / ours.squares)
        for name, ours in one.items()
        if (theirs := other.get(name)) is not None
        and theirs.squares
        and (ours.squares or 0.0) > least
        and ours.squares
    ]
    if not ratios or max(ratios) - min(ratios) > 1e-3 * max(ratios):
        return None
    return sum(ratios) / len(ratios)
