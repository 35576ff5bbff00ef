"""What runs do otherwise after rounding has set them apart, where rounding can't explain it.

Rounding grows, and not evenly: at a kink of a ReLU, or where gradients of examples cancel, one
gradient may jump. So what is looked for is what no rounding changes (settings, modes, draws,
examples); what one of the runs does to its own gradients or weights; and, as long as weights are
close, jumps of what depends smoothly on them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from evenstep.comparison.aligned import distance, furthest, join_calls, scale_between, typical
from evenstep.comparison.computed import (
    OTHER_LOSS,
    are_alike,
    as_a_multiple,
    find_other_outputs,
    mean_loss,
)
from evenstep.comparison.finding import Cause, Finding, because
from evenstep.comparison.reading import Kept, Run
from evenstep.comparison.updated import OTHER_WRITER, changed_weights, clipped, mean_gradients

_NEAR = 1e-4
"""The distance of most weights up to which two runs are close."""

_SURE = 1e-2
"""The relative difference that is no rounding's as long as two runs are close."""

_LEFT = 1e-6
"""The relative difference up to which gradients were left as they are."""

_JUMP = 100.0
"""How much further apart weights must be after an update than before it."""


def find_new_draws(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that a module draws other random numbers, which drew the same until then."""
    if not number:
        return None
    before, now = _draws(ours, theirs, number - 1), _draws(ours, theirs, number)
    for name, (kind, drew, its) in now.items():
        if drew == its or name not in before or before[name][1] != before[name][2]:
            continue
        if len(drew) == len(its):
            cause, seen = Cause.DROPOUT, "draws different random numbers, and drew the same before"
        else:
            run = ours if len(drew) > len(its) else theirs
            cause, seen = Cause.DRAWS, f"draws random numbers in {run.name} only"
        return because(
            cause,
            number,
            f"{name or 'the model'} ({kind}) {seen}",
            remedy="look for what draws, or seeds, between the updates in one of the runs: a "
            "sampler, an evaluation, augmentation",
            place=name,
        )
    return None


def _draws(
    ours: Run, theirs: Run, number: int
) -> Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Return by module its class, and what its calls drew in both runs."""
    mine, its = join_calls(ours.step(number)), join_calls(theirs.step(number))
    return {
        name: (call.kind, call.drew, its[name].drew)
        for name, call in mine.items()
        if name in its and its[name].calls == call.calls
    }


def find_new_changes(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that something else than the optimizer changed weights in one run only."""
    apart = _apart_before(ours, theirs, number)
    if apart > _NEAR:
        return None
    mine, its = changed_weights(ours, number), changed_weights(theirs, number)
    for name in sorted(mine.keys() ^ its.keys()):
        run, changed = (ours, mine) if name in mine else (theirs, its)
        before = run.weights(number - 1).get(name)
        if before is None or distance(changed[name], before) <= max(_NEAR, 10 * apart):
            continue  # a limit that only one of them has reached, perhaps
        seen = f"{name} was changed by something else than the optimizer in {run.name} only"
        return because(Cause.CHANGED, number, seen, remedy=OTHER_WRITER, place=name)
    name, far = furthest(mine, its)
    if far <= _SURE:
        return None
    seen = f"{name}, which is changed by something else than the optimizer, differs by {far:.1e}"
    return because(Cause.CHANGED, number, seen, remedy=OTHER_WRITER, place=name)


def _apart_before(ours: Run, theirs: Run, number: int) -> float:
    """Return how far most weights are apart before an update."""
    return typical(ours.weights(number - 1), theirs.weights(number - 1)) if number else 0.0


def find_jump_of_outputs(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that a module suddenly makes something else of nearly the same inputs and weights."""
    if not number or _apart_before(ours, theirs, number) > _NEAR:
        return None
    before = ours.weights(number - 1), theirs.weights(number - 1)

    def beyond(module: str) -> float:
        base = re.split(r" \(call | > ", module)[0]
        inside = (f"{base}.", f"{base}: ") if base else ("",)
        held = ({name: one[name] for name in one if name.startswith(inside)} for one in before)
        return max(_SURE, _JUMP * furthest(*held)[1])

    return find_other_outputs(ours, theirs, number, within=_NEAR, beyond=beyond)


def find_jump_of_losses(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that nearly the same outputs suddenly give a different loss."""
    steps = ours.step(number), theirs.step(number)
    whole = [join_calls(part).get("") for part in steps]
    if whole[0] is None or whole[1] is None or _apart_before(ours, theirs, number) > _NEAR:
        return None
    if not are_alike(whole[0], whole[1], what="outputs", within=_NEAR):
        return None
    if not all(step.losses for part in steps for step in part):
        return None
    means = [mean_loss(part) for part in steps]
    usual = max((_usual(kept) for kept in whole[0].outputs), default=0.0)
    apart = max(map(distance, whole[0].outputs, whole[1].outputs), default=0.0)
    explained = _JUMP * max(apart, _LEFT) * max(usual, usual**2)
    if not abs(means[0] - means[1]) > explained + 0.1 * _SURE * max(map(abs, means)):
        return None
    seen = (
        f"the outputs agree, and the mean of the losses is {means[0]:.6g} in {ours.name} and "
        f"{means[1]:.6g} in {theirs.name}"
    )
    return because(Cause.LOSS, number, seen, *as_a_multiple(*means), remedy=OTHER_LOSS)


def _usual(kept: Kept) -> float:
    """Return the root mean square of a tensor's values."""
    return math.sqrt((kept.squares or 0.0) / max(kept.elements, 1))


@dataclasses.dataclass(frozen=True)
class _Treated:
    """What a run did to its gradients between the backward pass and the update.

    Attributes:
        is_left: whether it left them as they are.
        scale: by which it multiplied all of them; None if it did something else.
        norms: the norm of all gradients before and after.
        largest: the largest value before and after.
    """

    is_left: bool
    scale: float | None
    norms: tuple[float, float]
    largest: tuple[float, float]


def find_new_clipping(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that runs clip, or change otherwise, their gradients in a different way.

    Clipping that leaves gradients below a limit as they are is the same in both as long as no
    gradient that was left is above the limit of the other.
    """
    mine, its = _treated(ours, number), _treated(theirs, number)
    if mine is None or its is None or mine.is_left is its.is_left is True:
        return None
    is_near = _apart_before(ours, theirs, number) <= _NEAR
    if mine.is_left is its.is_left:
        is_explained = not is_near or _are_clipped_alike(mine, its)
    else:
        left, other = (mine, its) if mine.is_left else (its, mine)
        is_explained = _is_below_limit(left, other, is_near)
    if is_explained:
        return None
    return clipped(ours, theirs, number, [1.0 if one.is_left else one.scale for one in (mine, its)])


def _are_clipped_alike(mine: _Treated, its: _Treated) -> bool:
    """Return whether both have one limit, or one factor, or something else that can't be told."""
    if mine.scale is None or its.scale is None:
        return True
    return _is_close(mine.norms[1], its.norms[1]) or _is_close(mine.scale, its.scale)


def _is_below_limit(left: _Treated, other: _Treated, is_near: bool) -> bool:
    """Return whether gradients were left as they are because they kept the other's limit."""
    if other.scale is not None and other.scale < 1:
        return left.norms[1] <= other.norms[1] * (1 + _SURE)
    if not is_near:
        return True  # by something else than the norm: too many reasons
    is_limited = other.largest[1] < other.largest[0]
    return is_limited and left.largest[1] <= other.largest[1] * (1 + _SURE)


def _treated(run: Run, number: int) -> _Treated | None:
    """Return what was done to gradients; None where the run exchanges them on the way."""
    made, seen = mean_gradients(run.step(number)), run.seen(number)
    if not seen or any(name not in made or made[name].squares is None for name in seen):
        return None
    made = {name: made[name] for name in seen}
    return _Treated(
        furthest(made, seen)[1] <= _LEFT,
        scale_between(made, seen),
        (_norm(made), _norm(seen)),
        (_largest(made), _largest(seen)),
    )


def _norm(gradients: Mapping[str, Kept]) -> float:
    return math.sqrt(math.fsum(kept.squares or 0.0 for kept in gradients.values()))


def _largest(gradients: Mapping[str, Kept]) -> float:
    return max(kept.largest or 0.0 for kept in gradients.values())


def _is_close(one: float, other: float) -> bool:
    return abs(one - other) <= _SURE * max(abs(one), abs(other))


def find_jump_of_weights(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that nearly the same gradients suddenly give other weights."""
    before = _apart_before(ours, theirs, number)
    if before > _NEAR or typical(ours.seen(number), theirs.seen(number)) > _SURE:
        return None
    pair = ours.weights(number), theirs.weights(number)
    if typical(*pair) <= max(_NEAR, _JUMP * before):
        return None
    name, far = furthest(*pair)
    return because(
        Cause.UPDATE,
        number,
        f"{name} differs by {far:.1e} of its size after the update, most by less before it",
        remedy="look at the optimizer's state: whether it is reset, loaded or changed in one of "
        "them",
        place=name,
    )
