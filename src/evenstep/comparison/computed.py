"""What two runs computed of the same examples: outputs of modules, losses, gradients, updates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from evenstep.comparison.aligned import (
    ROUNDING,
    Joined,
    distance,
    furthest,
    join_calls,
    same,
    scale_between,
)
from evenstep.comparison.finding import Cause, Finding
from evenstep.comparison.reading import Kept, ProcessStep, Run
from evenstep.errors import counted


def find_other_modes(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that a module trains in one run and not in the other, or computes in another dtype."""
    mine, its = join_calls(ours.step(number)), join_calls(theirs.step(number))
    for name, call in mine.items():
        other = its.get(name)
        if other is None:
            continue
        if call.trains != other.trains:
            modes = ["training" if one.trains else "evaluation" for one in (call, other)]
            return Finding(
                Cause.MODES,
                number,
                (
                    f"{_spelled(call)} is in {modes[0]} mode in {ours.name} and in {modes[1]} mode "
                    f"in {theirs.name}",
                ),
                "call model.train() before training, and after each evaluation",
            )
        dtypes = [[one.dtype for one in joined.outputs] for joined in (call, other)]
        if len(dtypes[0]) == len(dtypes[1]) and dtypes[0] != dtypes[1]:
            return Finding(
                Cause.PRECISION,
                number,
                (
                    f"{_spelled(call)} gives {', '.join(dtypes[0])} in {ours.name} and "
                    f"{', '.join(dtypes[1])} in {theirs.name}",
                ),
                "use autocast, and dtypes of parameters, in both or in neither",
            )
    return None


def find_other_outputs(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return the first module that gives other outputs for the same inputs; None if none does."""
    mine, its = join_calls(ours.step(number)), join_calls(theirs.step(number))
    for name, call in mine.items():
        other = its.get(name)
        if other is None or not _alike(call, other, what="inputs", bits=True):
            continue
        if _alike(call, other, what="outputs", bits=True):
            continue
        far = max(map(distance, call.outputs, other.outputs), default=math.inf)
        how_far = "" if far == math.inf else f" (relative difference at least {far:.1e})"
        seen = f"{_spelled(call)} has the same inputs and other outputs{how_far}"
        if "BatchNorm" in call.kind and call.trains and call.calls != other.calls:
            return Finding(
                Cause.BATCH_NORM,
                number,
                (
                    f"{seen}: its statistics are of {counted(call.calls, 'part')} of the "
                    f"batch in {ours.name}, of {counted(other.calls, 'part')} in {theirs.name}",
                ),
                "use nn.SyncBatchNorm.convert_sync_batchnorm, or layers that don't look at other "
                "examples (GroupNorm, LayerNorm)",
            )
        if call.drew or other.drew:
            return Finding(
                Cause.DROPOUT,
                number,
                (f"{seen}, and draws random numbers",),
                "seed both in the same way; with several processes each draws for its own part, "
                "so only evenstep, which seeds shards, gives the same numbers",
            )
        if far > ROUNDING:
            return Finding(
                Cause.KERNEL,
                number,
                (seen, *_facts_that_differ(ours, theirs)),
                "look at what the module reads besides its inputs, and at the settings above",
            )
        return Finding(
            Cause.ROUNDING,
            number,
            (
                f"{seen}: kernels round by the sizes of what they get, and by the settings",
                *_facts_that_differ(ours, theirs),
            ),
        )
    return None


def find_other_losses(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that one run takes a mean of means: outputs agree, and mean losses don't."""
    steps = ours.step(number), theirs.step(number)
    whole = [join_calls(step).get("") for step in steps]
    if whole[0] is None or whole[1] is None:
        return None
    if not _alike(whole[0], whole[1], what="outputs", bits=False):
        return None
    if not all(step.losses for part in steps for step in part):
        return None
    # What is accumulated in a process adds up; processes are averaged.
    means = [math.fsum(sum(step.losses) for step in part) / len(part) for part in steps]
    size = max(map(abs, means))
    if size == 0 or not abs(means[0] - means[1]) > ROUNDING * size:
        return None
    passes = [sum(len(step.losses) for step in part) / len(part) for part in steps]
    by_passes = abs(means[0] * passes[1] - means[1] * passes[0])
    if passes[0] != passes[1] and by_passes <= 1e-2 * size * max(passes):
        return None  # the sum of what was accumulated: gradients have another scale
    counts = [[len(call.examples or ()) for step in part for call in step.calls if call.examples]
              for part in steps]  # fmt: skip
    spelled = [" and ".join(map(str, count[:8])) for count in counts]
    return Finding(
        Cause.MEAN,
        number,
        (
            f"the outputs agree, and the mean of the losses is {means[0]:.6g} in {ours.name} and "
            f"{means[1]:.6g} in {theirs.name}",
            f"the losses are of {spelled[0]} examples in {ours.name}, and of {spelled[1]} in "
            f"{theirs.name}: where parts count differently (uneven batches, masked targets), the "
            f"mean of their means is not the mean of all",
        ),
        'sum the losses (reduction="sum") and divide by what counts in the whole batch',
    )


def find_other_gradients(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return how gradients differ, from the backward pass to what the optimizer sees."""
    mine, its = ours.step(number), theirs.step(number)
    for run, steps in ((ours, mine), (theirs, its)):
        for rank, step in enumerate(steps[1:], 1):
            name, far = furthest(steps[0].seen, step.seen)
            if far > 0:
                return Finding(
                    Cause.NOT_EXCHANGED,
                    number,
                    (
                        f"the gradient of {name} that the optimizer sees in process {rank} is not "
                        f"that of process 0 ({run.name})",
                    ),
                    "wrap the model in DistributedDataParallel, or average the gradients before "
                    "the update",
                )
    missing = sorted(mine[0].seen.keys() ^ its[0].seen.keys())
    if missing:
        run = ours if missing[0] in mine[0].seen else theirs
        return Finding(
            Cause.PARAMETERS,
            number,
            (f"{missing[0]} has a gradient in {run.name} only",),
            "look for requires_grad, for layers that are not called, and for what each optimizer "
            "was given",
        )
    made = _mean_gradients(mine), _mean_gradients(its)
    name, far = furthest(*made)
    if far > ROUNDING:
        return _scaled(ours, theirs, number, made) or Finding(
            Cause.GRADIENTS,
            number,
            (f"the gradient of {name} differs by {far:.1e} of its size after the backward pass",),
            "look at what the backward pass does besides: hooks, functions of your own, gradients "
            "of a part of the batch",
        )
    changed = mine[0].seen, its[0].seen
    name, far = furthest(*changed)
    if far <= ROUNDING:
        return None
    scale = scale_between(*changed)
    worlds = {len(mine), len(its), 1 / len(mine), 1 / len(its)} - {1}
    if scale is not None and any(abs(scale - world) < 1e-3 for world in worlds):
        return _scaled(ours, theirs, number, changed)
    spelled = [_spelled_scale(scale_between(*pair)) for pair in zip(made, changed, strict=True)]
    return Finding(
        Cause.CLIPPED,
        number,
        (
            f"between the backward pass and the update gradients are {spelled[0]} in "
            f"{ours.name} and {spelled[1]} in {theirs.name}",
        ),
        "clip (or unscale) the mean gradient of all processes, with the same limit in both",
    )


def _mean_gradients(steps: Sequence[ProcessStep]) -> Mapping[str, Kept]:
    """Return the mean gradients of all processes after the backward pass.

    Where a script exchanges gradients later, only their sums are known, since these are linear.
    """
    first = steps[0].exchanged
    if all(furthest(first, step.exchanged)[1] == 0 for step in steps):
        return first
    means = {}
    for name, kept in first.items():
        totals = [step.exchanged[name].total for step in steps if name in step.exchanged]
        total = math.fsum(one or 0.0 for one in totals) / len(steps)
        means[name] = dataclasses.replace(kept, digest=None, total=total, squares=None)
    return means


def _spelled_scale(scale: float | None) -> str:
    if scale is None:
        return "changed"
    return "left as they are" if abs(scale - 1) < 1e-3 else f"multiplied by {scale:.4g}"


def find_other_settings(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that the optimizers have other settings."""
    mine, its = ours.step(number)[0], theirs.step(number)[0]
    for place, (one, other) in enumerate(zip(mine.settings, its.settings, strict=False)):
        differ = sorted(key for key in {*one, *other} if one.get(key) != other.get(key))
        if differ:
            key = differ[0]
            return Finding(
                Cause.SETTINGS,
                number,
                (
                    f"{key} of group {place} is {one.get(key)} in {ours.name} and "
                    f"{other.get(key)} in {theirs.name}",
                ),
                "give both the same settings, also by their schedules",
            )
    return None


def find_other_update(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that the same gradients give other weights."""
    mine, its = ours.step(number)[0], theirs.step(number)[0]
    name, far = furthest(mine.weights, its.weights)
    if far > ROUNDING:
        return Finding(
            Cause.UPDATE,
            number,
            (f"{name} differs by {far:.1e} of its size after the update",),
            "look at the optimizer's state: a checkpoint that was loaded in one of them only",
        )
    name, far = furthest(mine.buffers, its.buffers)
    if far > ROUNDING:
        return Finding(
            Cause.BUFFERS,
            number,
            (f"{name} differs by {far:.1e} of its size after the update",),
            "processes keep buffers of their own part of the batch: use SyncBatchNorm, or don't "
            "compare buffers",
        )
    return None


def _scaled(
    ours: Run, theirs: Run, number: int, made: Sequence[Mapping[str, Kept]]
) -> Finding | None:
    scale = scale_between(*made)
    if scale is None:
        return None
    counts = [sum(len(step.losses) for step in run.step(number)) for run in (ours, theirs)]
    return Finding(
        Cause.SCALE,
        number,
        (
            f"all gradients of {theirs.name} are {scale:.6g} times those of {ours.name}",
            f"{counts[0]} and {counts[1]} losses were backpropagated for the update",
        ),
        "divide the loss by the number of accumulated batches, and average over processes instead "
        "of adding",
    )


def first_that_rounds(ours: Run, theirs: Run, number: int) -> str | None:
    """Return which of two runs' tensors differ in a bit after an update; None if none does."""
    mine, its = ours.step(number)[0], theirs.step(number)[0]
    for what, one, other in (
        ("the gradient of", mine.exchanged, its.exchanged),
        ("", mine.weights, its.weights),
        ("the buffer", mine.buffers, its.buffers),
    ):
        for name in one:
            if name in other and not same(one[name], other[name]):
                return f"{what} {name}".strip()
    return None


def _alike(call: Joined, other: Joined, *, what: str, bits: bool) -> bool:
    """Return whether a module's "inputs" or "outputs" are equal, to the bit or within rounding.

    Tensors without examples (a loss) don't add up over calls, so they say nothing where these have
    other numbers.
    """
    ours, theirs = getattr(call, what), getattr(other, what)
    if len(ours) != len(theirs):
        return False
    return all(
        (call.calls != other.calls and None in (one.rows, its.rows))
        or same(one, its)
        or (not bits and distance(one, its) <= ROUNDING)
        for one, its in zip(ours, theirs, strict=True)
    )


def _spelled(call: Joined) -> str:
    return f"{call.module or 'the model'} ({call.kind})"


def _facts_that_differ(ours: Run, theirs: Run) -> list[str]:
    mine, its = ours.processes[0].facts, theirs.processes[0].facts
    return [
        f"{name}: {mine.get(name, 'not set')} in {ours.name}, {its.get(name, 'not set')} in "
        f"{theirs.name}"
        for name in sorted({*mine, *its})
        if mine.get(name) != its.get(name)
    ]
