"""What two runs made of the same losses: gradients, and updates of the weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from evenstep.comparison.aligned import (
    distance,
    divided,
    first_that_differs,
    furthest,
    rounding_of,
    same,
    scale_between,
    typical,
)
from evenstep.comparison.computed import times_larger
from evenstep.comparison.finding import Cause, Finding, because
from evenstep.comparison.reading import Kept, ProcessStep, Run
from evenstep.errors import counted

OTHER_WRITER = (
    "look for code that writes to weights: weight clipping, averages (EMA), a checkpoint that is "
    "loaded, a layer that is initialised again"
)


_NEAR = 0.2
"""The relative difference up to which gradients have the factor that their losses have."""


def find_changed_weights(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that something else than the optimizer has changed weights before the step."""
    mine, its = changed_weights(ours, number), changed_weights(theirs, number)
    only = sorted(mine.keys() ^ its.keys())
    name, far = furthest(mine, its)
    if only:
        run = ours if only[0] in mine else theirs
        seen = f"{only[0]} was changed by something else than the optimizer in {run.name} only"
    elif far > rounding_of(ours.step(number)):
        seen = (
            f"{name}, which is changed by something else than the optimizer, differs by {far:.1e}"
        )
    else:
        return None
    return because(
        Cause.CHANGED, number, seen, remedy=OTHER_WRITER, place=only[0] if only else name
    )


def changed_weights(run: Run, number: int) -> Mapping[str, Kept]:
    """Return the weights that were changed, except by the exchange of what processes update."""
    changed = run.step(number)[0].changed
    before = run.weights(number - 1) if number else {}
    return {
        name: kept
        for name, kept in changed.items()
        if name not in before or not same(kept, before[name])
    }


def find_skipped(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that a GradScaler leaves the update out in one of the runs."""
    mine, its = ours.step(number)[0], theirs.step(number)[0]
    if mine.is_skipped == its.is_skipped:
        return None
    run, step = (ours, mine) if mine.is_skipped else (theirs, its)
    return because(
        Cause.SKIPPED,
        number,
        f"the GradScaler of {run.name} leaves this update out, because a gradient is infinite "
        f"or NaN: it had multiplied the loss by {step.scale:g}",
        remedy="start with a smaller init_scale, or compare from the first update on that both "
        "make",
    )


def find_other_optimizer(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that another one of several optimizers makes the update."""
    mine, its = ours.step(number)[0], theirs.step(number)[0]
    if mine.optimizer == its.optimizer:
        return None
    return because(
        Cause.TURNS,
        number,
        f"the update is made by optimizer {mine.optimizer} in {ours.name} and by optimizer "
        f"{its.optimizer} in {theirs.name} (numbered from 0, as they were first called)",
        remedy="call the optimizers in the same order, and each as often, in both",
    )


def find_not_exchanged(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that optimizers of several processes see other gradients."""
    if ours.step(number)[0].is_skipped and theirs.step(number)[0].is_skipped:
        return None
    for run, steps in ((ours, ours.step(number)), (theirs, theirs.step(number))):
        for rank, step in enumerate(steps[1:], 1):
            name = first_that_differs(steps[0].seen, step.seen)
            if name is not None and not step.updates_parts:
                return because(
                    Cause.NOT_EXCHANGED,
                    number,
                    f"the gradient of {name} that the optimizer sees in process {rank} is not "
                    f"that of process 0 ({run.name})",
                    remedy="wrap the model in DistributedDataParallel, or average the gradients "
                    "before the update",
                    place=name,
                )
    return None


def find_other_gradients(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return how gradients differ, from the backward pass to what the optimizer sees."""
    mine, its = ours.step(number), theirs.step(number)
    if mine[0].is_skipped and its[0].is_skipped:
        return None
    seen = ours.seen(number), theirs.seen(number)
    if not seen[0] or not seen[1]:
        return None
    missing = sorted(seen[0].keys() ^ seen[1].keys())
    if missing:
        run = ours if missing[0] in seen[0] else theirs
        return because(
            Cause.PARAMETERS,
            number,
            f"{missing[0]} has a gradient in {run.name} only",
            remedy="look for requires_grad, for layers that are not called, and for what each "
            "optimizer was given",
            place=missing[0],
        )
    rounding = rounding_of(mine)
    if seen[0] and furthest(*seen)[1] <= rounding:
        return None  # whatever was done to them on the way
    made = (mean_gradients(mine) or seen[0]), (mean_gradients(its) or seen[1])
    name, far = furthest(*made)
    if far > rounding:
        return _scaled(ours, theirs, number, made) or because(
            Cause.GRADIENTS,
            number,
            f"the gradient of {name} differs by {far:.1e} of its size after the backward pass",
            remedy="look at what the backward pass does besides: hooks, functions of your own, "
            "gradients of a part of the batch; and at gradients that are left from before, or "
            "changed between two backward passes (zero_grad, clipping)",
            place=name,
        )
    name, far = furthest(*seen)
    if far <= rounding:
        return None
    scale = scale_between(*seen)
    worlds = {len(mine), len(its), 1 / len(mine), 1 / len(its)} - {1}
    if scale is not None and any(abs(scale - world) < 1e-3 for world in worlds):
        return _scaled(ours, theirs, number, seen)
    scales = [scale_between(*pair) for pair in zip(made, seen, strict=True)]
    return clipped(ours, theirs, number, scales)


def clipped(ours: Run, theirs: Run, number: int, scales: Sequence[float | None]) -> Finding:
    """Say by what each run multiplies its gradients before the update; None for something else."""
    spelled = [*map(_spelled_scale, scales)]
    return because(
        Cause.CLIPPED,
        number,
        f"between the backward pass and the update gradients are {spelled[0]} in "
        f"{ours.name} and {spelled[1]} in {theirs.name}",
        remedy="clip (or unscale) the mean gradient of all processes, with the same limit in both",
    )


def mean_gradients(steps: Sequence[ProcessStep]) -> Mapping[str, Kept]:
    """Return the mean gradients of all processes after the backward pass.

    Where a script exchanges gradients later, only sums and sketches are known, which are linear.
    """
    scale = steps[0].scale
    first = {name: divided(kept, scale) for name, kept in steps[0].exchanged.items()}
    if all(furthest(steps[0].exchanged, step.exchanged)[1] == 0 for step in steps):
        return first
    means = {}
    for name, kept in first.items():
        every = [step.exchanged[name] for step in steps if name in step.exchanged]
        totals, sketches = [one.total or 0.0 for one in every], [one.sketch or () for one in every]
        whole = dataclasses.replace(
            kept,
            digest=None,
            total=math.fsum(totals),
            squares=None,
            sketch=(*map(math.fsum, zip(*sketches, strict=False)),) or None,
        )
        means[name] = divided(whole, len(steps))
    return means


def _spelled_scale(scale: float | None) -> str:
    if scale is None:
        return "changed"
    return "left as they are" if abs(scale - 1) < 1e-3 else f"multiplied by {scale:.4g}"


_FIRST = ("class", "lr")
"""The settings that say most."""


def find_other_settings(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that the optimizers have other settings."""
    mine, its = ours.step(number)[0], theirs.step(number)[0]
    for place, (one, other) in enumerate(zip(mine.settings, its.settings, strict=False)):
        differ = {key for key in {*one, *other} if one.get(key) != other.get(key)}
        differ -= {"initial_lr"} if "lr" in differ else set()
        differ &= {*_FIRST} if "class" in differ else differ
        if differ:
            return Finding(
                Cause.SETTINGS,
                number,
                tuple(
                    f"{key} of group {place} is {one.get(key)} in {ours.name} and "
                    f"{other.get(key)} in {theirs.name}"
                    for key in sorted(differ, key=lambda key: (key not in _FIRST, key))
                ),
                "give both the same settings, also by their schedules",
            )
    return _other_groups(ours, theirs, number)


def _other_groups(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that a parameter is in a group with other settings."""
    mine, its = (run.step(number)[0].settings_by_parameter for run in (ours, theirs))
    found = [
        (name, key)
        for name in mine
        if name in its
        for key in sorted({*mine[name], *its[name]} - {"initial_lr"})
        if mine[name].get(key) != its[name].get(key)
    ]
    if not found:
        return None
    name, key = found[0]
    more = len({one for one, _ in found} - {name})
    others = f"; {counted(more, 'parameter')} more have other settings" if more else ""
    return because(
        Cause.SETTINGS,
        number,
        f"{key} of {name} is {mine[name].get(key)} in {ours.name} and {its[name].get(key)} in "
        f"{theirs.name}{others}",
        remedy="put parameters into the same groups (of weight decay, of rates) in both",
        place=name,
    )


def find_other_update(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that the same gradients give other weights.

    Of a gradient that is zero but for rounding, Adam and its like make as large an update as of
    any other: a few weights say nothing where gradients round.
    """
    mine, its = ours.step(number)[0], theirs.step(number)[0]
    seen_by = ours.seen(number), theirs.seen(number)
    noise = {
        name
        for name, kept in seen_by[0].items()
        if name in seen_by[1] and distance(kept, seen_by[1][name]) > rounding_of([mine])
    }
    for cause, one, other in (
        (Cause.UPDATE, ours.weights(number), theirs.weights(number)),
        (Cause.BUFFERS, mine.buffers, its.buffers),
    ):
        name, far = furthest(
            *({key: kept[key] for key in kept.keys() - noise} for kept in (one, other))
        )
        is_rounded = cause is Cause.UPDATE and any(
            not same(kept, seen_by[1][key]) for key, kept in seen_by[0].items() if key in seen_by[1]
        )
        far = typical(one, other) if is_rounded else far
        if far > rounding_of([mine]):
            seen = f"{name} differs by {far:.1e} of its size after the update"
            if cause is Cause.BUFFERS:
                return _other_buffers(ours, theirs, number, name, seen)
            remedy = (
                "look at the optimizer's state: a checkpoint that was loaded in one of them only"
            )
            return because(cause, number, seen, remedy=remedy, place=name)
    return None


def _other_buffers(ours: Run, theirs: Run, number: int, name: str, seen: str) -> Finding:
    """Say why a buffer differs: as it did before, by its module's settings, or by processes."""
    before = [run.processes[0].buffers.get(name) for run in (ours, theirs)]
    is_old = before[0] is not None and before[1] is not None and not same(before[0], before[1])
    module = name.rpartition(".")[0]
    says = [run.processes[0].settings.get(module, "") for run in (ours, theirs)]
    if says[0] != says[1]:
        line = f"{module} says of itself: {says[0]} in {ours.name}, {says[1]} in {theirs.name}"
        remedy = "build the model with the same settings in both"
        return because(Cause.LAYER, number, seen, line, remedy=remedy, place=module)
    if is_old:
        seen = f"{seen}, and before the first one"
        remedy = "load one checkpoint in both: buffers differ as weights do"
    elif max(len(run.processes) for run in (ours, theirs)) > 1:
        remedy = (
            "processes keep buffers of their own part of the batch: use SyncBatchNorm, or don't "
            "compare buffers"
        )
    else:
        remedy = (
            "look for what writes to it besides: calls of the model in training mode that nothing "
            "is learned from (an evaluation without eval()), code of your own"
        )
    return because(Cause.BUFFERS, number, seen, remedy=remedy, place=name)


def _scaled(
    ours: Run, theirs: Run, number: int, made: Sequence[Mapping[str, Kept]]
) -> Finding | None:
    has_losses = all(step.losses for run in (ours, theirs) for step in run.step(number))
    factor = times_larger(ours, theirs, number) if has_losses else None
    scale = scale_between(made[0], made[1])
    parts = ""
    if scale is None and factor:  # parts that count differently make a mean of means besides
        norms = [math.sqrt(math.fsum(kept.squares or 0.0 for kept in one.values())) for one in made]
        scale = norms[1] / norms[0] if norms[0] else 0.0
        if abs(scale - factor) > _NEAR * factor:
            return None
        parts = " together, not each (a mean of means, too, once the scale is mended)"
    if scale is None:
        return None
    counts = [sum(len(step.losses) for step in run.step(number)) for run in (ours, theirs)]
    return because(
        Cause.SCALE,
        number,
        f"all gradients of {theirs.name} are {scale:.6g} times those of {ours.name}{parts}",
        f"{counts[0]} and {counts[1]} losses were backpropagated for the update",
        remedy="divide the loss by the number of accumulated batches, and average over processes "
        "instead of adding",
    )


def first_that_rounds(ours: Run, theirs: Run, number: int) -> str | None:
    """Return which of two runs' tensors differ in a bit after an update; None if none does."""
    mine, its = ours.step(number)[0], theirs.step(number)[0]
    has_one_scale = mine.scale == its.scale
    for what, one, other in (
        ("the gradient of", mine.exchanged if has_one_scale else {}, its.exchanged),
        ("the gradient of", ours.seen(number), theirs.seen(number)),
        ("", ours.weights(number), theirs.weights(number)),
        ("the buffer", mine.buffers, its.buffers),
    ):
        for name in one:
            if name in other and not same(one[name], other[name]):
                return f"{what} {name}".strip()
    return None
