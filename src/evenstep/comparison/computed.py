"""What two runs computed of the same examples: outputs of modules, and losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence

from evenstep.comparison.aligned import Joined, distance, join_calls, rounding_of, same
from evenstep.comparison.finding import Cause, Finding, because
from evenstep.comparison.reading import Kept, ProcessStep, Run
from evenstep.errors import counted

OTHER_LOSS = (
    "look at the settings, weights, targets and penalties of the loss, and at how it averages"
)


def find_other_modes(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that a module trains in one run only, or computes in a different dtype."""
    mine, its = join_calls(ours.step(number)), join_calls(theirs.step(number))
    for name, call in mine.items():
        other = its.get(name)
        if other is None:
            continue
        if call.trains != other.trains:
            modes = ["training" if one.trains else "evaluation" for one in (call, other)]
            return because(
                Cause.MODES,
                number,
                f"{_spelled(call)} is in {modes[0]} mode in {ours.name} and in {modes[1]} mode "
                f"in {theirs.name}",
                remedy="call model.train() before training, and after each evaluation",
                place=name,
            )
        dtypes = [[one.dtype for one in joined.outputs] for joined in (call, other)]
        autocasts = [one[""].autocast if "" in one else None for one in (mine, its)]
        if len(dtypes[0]) == len(dtypes[1]) and dtypes[0] != dtypes[1]:
            return because(
                Cause.PRECISION,
                number,
                f"{_spelled(call)} gives {', '.join(dtypes[0])} in {ours.name} and "
                f"{', '.join(dtypes[1])} in {theirs.name}",
                *_differing("autocast", ours, autocasts[0], theirs, autocasts[1]),
                remedy="use autocast, and dtypes of parameters, in both or in neither",
                place=name,
            )
    return None


def find_other_outputs(
    ours: Run,
    theirs: Run,
    number: int,
    *,
    within: float = 0.0,
    beyond: Callable[[str], float] = lambda module: 0.0,
) -> Finding | None:
    """Return the first module that gives other outputs for the same inputs; None if none does.

    Args:
        ours: a run.
        theirs: another one.
        number: the update.
        within: the distance up to which inputs are the same.
        beyond: gives for the name of a module the distance above which its outputs differ.
    """
    mine, its = join_calls(ours.step(number)), join_calls(theirs.step(number))
    for name, call in mine.items():
        other = its.get(name)
        if other is None or not are_alike(call, other, what="inputs", within=within):
            continue
        if are_alike(call, other, what="outputs", within=beyond(name)):
            continue
        pairs = _telling(call, other, call.outputs, other.outputs)
        far = max((distance(*pair) for pair in pairs), default=math.inf)
        how_far = "" if far == math.inf else f" (relative difference about {far:.1e})"
        seen = f"{_spelled(call)} has the same inputs and different outputs{how_far}"
        is_part = (call.calls, call.kind) != (other.calls, other.kind)
        is_rounding = far <= rounding_of(ours.step(number))
        if (
            "BatchNorm" in call.kind
            and call.trains
            and max(call.calls, other.calls) > 1
            and (is_part or not is_rounding)
        ):
            return because(
                Cause.BATCH_NORM,
                number,
                f"{seen}: {_parts(ours, call, theirs, other)}",
                remedy="use nn.SyncBatchNorm.convert_sync_batchnorm, or layers that don't look at "
                "other examples (GroupNorm, LayerNorm)",
                place=name,
            )
        settings = [run.processes[0].settings.get(name, "") for run in (ours, theirs)]
        differing = [*_differing("it says of itself", ours, settings[0], theirs, settings[1])]
        if differing and not is_rounding:
            return because(
                Cause.LAYER,
                number,
                seen,
                *differing,
                remedy="build the model with the same settings in both",
                place=name,
            )
        if bool(call.drew) != bool(other.drew):
            run = ours if call.drew else theirs
            return because(
                Cause.DRAWS,
                number,
                f"{seen}: it draws random numbers in {run.name} only",
                remedy="use the same rate of dropout, and the same mode (train or eval), in both",
                place=name,
            )
        if call.drew != other.drew:
            return because(
                Cause.DROPOUT,
                number,
                f"{seen}, and draws different random numbers",
                remedy="seed both in the same way; with several processes each draws for its own "
                "part, so only evenstep, which seeds shards, gives the same numbers",
                place=name,
            )
        if not is_rounding:
            return because(
                Cause.KERNEL,
                number,
                seen,
                *_facts_that_differ(ours, theirs),
                remedy="look at what the module reads besides its inputs, and at the settings "
                "above",
                place=name,
            )
        return because(
            Cause.ROUNDING,
            number,
            f"{seen}: kernels round by the sizes of what they get, and by the settings",
            *_facts_that_differ(ours, theirs),
            place=name,
        )
    return None


def find_other_losses(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that one run takes a mean of means: outputs agree, and mean losses don't."""
    steps = ours.step(number), theirs.step(number)
    whole = [join_calls(step).get("") for step in steps]
    if whole[0] is None or whole[1] is None:
        return None
    rounding = rounding_of(steps[0])
    if not are_alike(whole[0], whole[1], what="outputs", within=rounding):
        return None
    if not all(step.losses for part in steps for step in part):
        return None
    # What is accumulated in a process adds up; processes are averaged.
    means = [mean_loss(part) for part in steps]
    size = max(map(abs, means))
    if size == 0 or not abs(means[0] - means[1]) > rounding * size:
        return None
    if times_larger(ours, theirs, number):
        return None  # a sum of what was accumulated, or over processes: gradients, too, are larger
    counts = [[len(call.examples or ()) for step in part for call in step.calls
               if call.is_whole and call.examples]
              for part in steps]  # fmt: skip
    spelled = [" and ".join(map(str, count[:8])) for count in counts]
    seen = (
        f"the outputs agree, and the mean of the losses is {means[0]:.6g} in {ours.name} and "
        f"{means[1]:.6g} in {theirs.name}"
    )
    if sorted(counts[0]) == sorted(counts[1]) and len(steps[0]) == len(steps[1]):
        sizes = {*counts[0], *counts[1]}
        lines = as_a_multiple(*means, sizes=sizes)
        return because(Cause.LOSS, number, seen, *lines, remedy=OTHER_LOSS)
    return because(
        Cause.MEAN,
        number,
        seen,
        f"the losses are of {spelled[0]} examples in {ours.name}, and of {spelled[1]} in "
        f"{theirs.name}: where parts count differently (uneven batches, masked targets), the "
        f"mean of their means is not the mean of all",
        remedy='sum the losses (reduction="sum") and divide by what counts in the whole batch',
    )


def as_a_multiple(mine: float, its: float, *, sizes: Container[int] = ()) -> Iterator[str]:
    """Yield a line if one loss is a whole multiple of the other; `sizes` are those of batches."""
    times = max(map(abs, (mine, its))) / (min(map(abs, (mine, its))) or math.inf)
    if round(times) < 2 or abs(times - round(times)) >= 1e-4 * times:
        return
    if round(times) in sizes:
        yield (
            f"one is {round(times)} times the other, as many as a batch has examples: look whether "
            f"one is a sum over the examples, and the other their mean"
        )
    else:
        yield (
            f"one is {round(times)} times the other: look whether it is divided by a number of "
            f"batches (or processes) which fewer of them make up"
        )


def times_larger(ours: Run, theirs: Run, number: int) -> float | None:
    """Return how much larger the mean loss of `theirs` is if the losses' number explains it.

    It does if a process adds up what it accumulates, or if the loss is multiplied by the number of
    processes. A mean of means may be in it, too: it is far smaller.
    """
    steps = ours.step(number), theirs.step(number)
    means = [mean_loss(part) for part in steps]
    passes = [sum(len(step.losses) for step in part) / len(part) for part in steps]
    for factor in (passes[1] / passes[0], len(steps[1]) / len(steps[0])):
        if factor != 1 and abs(means[1] - factor * means[0]) <= 0.1 * abs(means[1]):
            return factor
    return None


def mean_loss(steps: Sequence[ProcessStep]) -> float:
    """Return the mean over processes of the losses that each backpropagated for an update."""
    return math.fsum(sum(step.losses) / step.scale for step in steps) / len(steps)


def are_alike(call: Joined, other: Joined, *, what: str, within: float = 0.0) -> bool:
    """Return whether a module's "inputs" or "outputs" are equal: to the bit, or within a distance.

    Tensors without examples (a loss) don't add up over calls, so they say nothing where these have
    other numbers.
    """
    ours, theirs = getattr(call, what), getattr(other, what)
    if len(ours) != len(theirs):
        return False
    return all(
        same(one, its) or (within > 0 and distance(one, its) <= within)
        for one, its in _telling(call, other, ours, theirs)
    )


def _telling(
    call: Joined, other: Joined, ours: Sequence[Kept], theirs: Sequence[Kept]
) -> Iterator[tuple[Kept, Kept]]:
    """Yield the pairs of tensors that say something: of other numbers of calls, those by example.

    Without as many tensors on both sides, none does.
    """
    if len(ours) == len(theirs):
        for one, its in zip(ours, theirs, strict=True):
            if call.calls == other.calls or None not in (one.rows, its.rows):
                yield one, its


def _parts(ours: Run, call: Joined, theirs: Run, other: Joined) -> str:
    """Return of which parts of the batch two runs took the statistics."""
    parts = [counted(one.calls, "part") for one in (call, other)]
    if call.kind != other.kind:
        parts = [f"{part} ({one.kind})" for part, one in zip(parts, (call, other), strict=True)]
    if parts[0] == parts[1]:
        return f"its statistics are of {parts[0]} of the batch, which one of the runs puts together"
    return (
        f"its statistics are of {parts[0]} of the batch in {ours.name}, of {parts[1]} in "
        f"{theirs.name}"
    )


def _spelled(call: Joined) -> str:
    return f"{call.module or 'the model'} ({call.kind})"


def _facts_that_differ(ours: Run, theirs: Run) -> list[str]:
    mine, its = ours.processes[0].facts, theirs.processes[0].facts
    return [
        line
        for name in sorted({*mine, *its})
        for line in _differing(name, ours, mine.get(name), theirs, its.get(name))
    ]


def _differing(
    what: str, ours: Run, one: str | None, theirs: Run, other: str | None
) -> Iterator[str]:
    """Yield a line if a setting has other values in two runs."""
    if one != other:
        yield f"{what}: {one or 'not set'} in {ours.name}, {other or 'not set'} in {theirs.name}"
