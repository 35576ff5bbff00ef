"""The examples of two runs: which reached the models, in which update and process, how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from evenstep.comparison.aligned import ROWS_MODULUS, join_calls
from evenstep.comparison.finding import Cause, Finding, because
from evenstep.comparison.reading import Run
from evenstep.errors import counted


def find_other_data(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return why the examples of an update differ; None if they don't, or none were recorded."""
    mine, its = rows_of(ours, number), rows_of(theirs, number)
    if not mine or not its or Counter(mine) == Counter(its):
        return None
    for run in (theirs, ours):
        finding = _same_in_processes(run, number)
        if finding is not None:
            return finding
    if {*mine} == {*its} and (more := _more_calls(ours, theirs, number)):
        return more
    if other := _other_lengths(ours, theirs, number):
        return other
    if not (Counter(mine) & Counter(its)) and (other := _other_arguments(ours, theirs, number)):
        return other
    return (
        _other_sizes(ours, theirs, number)
        or _at_an_epochs_end(ours, theirs, number)
        or _another_order(ours, theirs, number)
    )


def _sizes(run: Run, number: int) -> list[int]:
    """Return the number of examples of each call of a model, in all processes."""
    calls = [call for step in run.step(number) for call in step.calls if call.is_whole]
    return [len(call.examples) for call in calls if call.examples]


def rows_of(run: Run, number: int) -> list[str]:
    """Return the digests of the examples of an update, in all processes."""
    return [row for step in run.step(number) for row in step.examples]


def _same_in_processes(run: Run, number: int) -> Finding | None:
    """Return that two processes have most of their examples in common."""
    parts = [Counter(step.examples) for step in run.step(number)]
    for rank, part in enumerate(parts):
        for other in range(rank):
            common = (part & parts[other]).total()
            if common * 2 > part.total():
                return because(
                    Cause.SAME_ROWS,
                    number,
                    f"{common} of the {part.total()} examples of process {rank} are those of "
                    f"process {other} ({run.name})",
                    remedy="give the loader a DistributedSampler, or a sampler that gives each "
                    "process examples of its own; look whether torch.distributed was initialised",
                )
    return None


def _more_calls(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that every example reaches the model as many times more often."""
    mine, its = Counter(rows_of(ours, number)), Counter(rows_of(theirs, number))
    times = mine.total() / its.total()
    if any(count != its[row] * times for row, count in mine.items()):
        return None
    counts = [max(found.values()) for found in (mine, its)]
    return because(
        Cause.CALLS,
        number,
        f"each example reaches the model {counted(counts[0], 'time')} in {ours.name}, and "
        f"{counted(counts[1], 'time')} in {theirs.name}",
        remedy="look for a second call of the model on a batch: a term of the loss, "
        "checkpointing, a metric that is computed outside of torch.no_grad()",
    )


def _other_lengths(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that examples which begin alike are filled up to different lengths."""
    calls = [
        [call for step in run.step(number) for call in step.calls if call.is_whole and call.starts]
        for run in (ours, theirs)
    ]
    starts = [sum(call.starts for call in every) % ROWS_MODULUS for every in calls]
    lengths = [{tuple(one.shape[1:] for one in call.inputs) for call in every} for every in calls]
    counts = [{len(one) for one in found} for found in lengths]
    if starts[0] != starts[1] or lengths[0] == lengths[1] or counts[0] != counts[1]:
        return None
    spelled = [" and ".join(str(tuple(call.inputs[0].shape)) for call in every) for every in calls]
    return because(
        Cause.ARGUMENTS,
        number,
        f"the examples begin alike and have different lengths: the model gets {spelled[0]} in "
        f"{ours.name}, {spelled[1]} in {theirs.name}, so each batch was filled up to its "
        f"longest example",
        remedy='fill all batches up to one length (padding="max_length") and compare again: '
        "filling changes results where it is not masked, and where a mean counts it",
    )


def _other_arguments(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that the model is given other tensors, or tensors of a different shape."""
    calls = [join_calls(run.step(number)).get("") for run in (ours, theirs)]
    if calls[0] is None or calls[1] is None:
        return None
    shapes = [[one.shape[1:] for one in call.inputs] for call in calls if call is not None]
    if shapes[0] == shapes[1] or not all(shapes):
        return None
    spelled = [
        ", ".join(str(tuple(kept.shape)) for kept in call.inputs)
        for call in calls
        if call is not None
    ]
    return because(
        Cause.ARGUMENTS,
        number,
        f"the model gets tensors of the shapes {spelled[0]} in {ours.name}, and {spelled[1]} "
        f"in {theirs.name}",
        remedy="look at the batch size, the length of sequences and the size of images, and at "
        "what the loop gives to the model besides (labels, masks); record with --batch-dim 1 "
        "where the batch is the second dimension",
    )


def _other_sizes(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that the data loaders draw from data sets of different sizes.

    Where updates are made from a different number of examples before an epoch ends, the batch size
    says more; processes may each have a part of the data set.
    """
    sizes = _size_of_data(ours), _size_of_data(theirs)
    if None in sizes or sizes[0] == sizes[1] or len(ours.processes) != len(theirs.processes):
        return None
    is_end = _is_an_epochs_last(ours, number) or _is_an_epochs_last(theirs, number)
    if len(rows_of(ours, number)) != len(rows_of(theirs, number)) and not is_end:
        return None
    return because(
        Cause.DATA,
        number,
        f"the data loaders draw from {sizes[0]} examples in {ours.name}, and from {sizes[1]} in "
        f"{theirs.name}",
        remedy="give both the same data set: look at what is left out, filtered or split off",
    )


def _at_an_epochs_end(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that the last batch of an epoch is dropped, or was filled up."""
    is_last = [_is_an_epochs_last(run, number) for run in (ours, theirs)]
    mine, its = Counter(rows_of(ours, number)), Counter(rows_of(theirs, number))
    if number and (is_last[0] or is_last[1]) and is_last[0] != is_last[1]:
        epoch = (ours if is_last[0] else theirs).processes[0].steps[number].epoch
        counts = [_updates_of_epoch(run, epoch) for run in (ours, theirs)]
        shorter = ours if counts[0] < counts[1] else theirs
        return because(
            Cause.DROPPED,
            number,
            f"an epoch has {counts[0]} updates in {ours.name} and {counts[1]} in "
            f"{theirs.name}: {shorter.name} has no update for the last examples",
            remedy="use drop_last=True in both, or in neither",
        )
    for run, more, less in ((theirs, its, mine), (ours, mine, its)):
        extra = more - less
        seen = Counter(row for step in range(number) for row in rows_of(run, step))
        if extra and not (less - more) and all(seen[row] or less[row] for row in extra):
            return because(
                Cause.PADDED,
                number,
                f"{extra.total()} examples of {run.name} were used before in the same epoch: "
                f"what divides an epoch over processes (DistributedSampler, Accelerate) "
                f"repeats some, so that each process has as many",
                remedy="use a number of examples that the processes divide; or drop the rest in "
                "both (drop_last=True), or repeat none (even_batches=False of Accelerate)",
            )
    return None


def _is_an_epochs_last(run: Run, number: int) -> bool:
    steps = run.processes[0].steps
    return number + 1 < len(steps) and steps[number + 1].epoch > steps[number].epoch


def _updates_of_epoch(run: Run, epoch: int) -> int:
    return sum(step.epoch == epoch for step in run.processes[0].steps)


def _another_order(ours: Run, theirs: Run, number: int) -> Finding:
    mine, its = Counter(rows_of(ours, number)), Counter(rows_of(theirs, number))
    if mine.total() != its.total():
        spelled = [" + ".join(map(str, _sizes(run, number))) for run in (ours, theirs)]
        return because(
            Cause.MORE_ROWS,
            number,
            f"{mine.total()} examples ({spelled[0]}) in {ours.name}, {its.total()} "
            f"({spelled[1]}) in {theirs.name}",
            *_rates(ours, theirs, number),
            remedy="divide the batch size by the number of processes (or of accumulated batches); "
            "a larger batch is a different experiment, with a different learning rate",
        )
    steps = range(min(ours.steps, theirs.steps))
    every = [Counter(row for step in steps for row in rows_of(run, step)) for run in (ours, theirs)]
    if changed := _changed_in_place(ours, theirs, number):
        return changed
    shared = (every[0] & every[1]).total() / max(every[0].total(), 1)
    for run, other in ((theirs, ours), (ours, theirs)):
        if shared > 0.01 and _repeats_its_order(run) and not _repeats_its_order(other):
            return because(
                Cause.SAME_ORDER,
                number,
                f"the second epoch of {run.name} has the batches of its first, in their order",
                remedy="call sampler.set_epoch(epoch) before each epoch, or use a shuffling loader",
            )
    common = (mine & its).total()
    if every[0] == every[1]:
        return because(
            Cause.ORDER,
            number,
            f"{common} of {mine.total()} examples are the same; over all "
            f"{len(steps)} updates, all are",
            remedy="seed the order of both in the same way (Loader, or DataLoader's generator=; "
            "torch's DistributedSampler has an order of its own)",
        )
    if not common and shared < 0.01:
        evidence = "none of the examples of one is among those of the other"
    else:
        evidence = f"{shared:.0%} of the examples of {ours.name} are in {theirs.name}, too"
    others = common * 2 > mine.total() and not (mine - its) <= every[1]
    size = _size_of_data(ours) if _size_of_data(ours) == _size_of_data(theirs) else None
    by_chance = every[1].total() / size if size else 1.0
    evidence = f"{evidence}, and both draw from {size}" if size else evidence
    is_order = shared > 0.5 * min(by_chance, 1.0) and not others
    return because(
        Cause.ORDER if is_order else Cause.DATA,
        number,
        f"{common} of {mine.total()} examples are the same; {evidence}",
        remedy="seed data, augmentation and order in the same way, and draw from the seeded "
        "generator as often (several processes may have a sampler of their own)",
    )


def _changed_in_place(ours: Run, theirs: Run, number: int) -> Finding | None:
    """Return that some examples are others, and the rest are at their places.

    Augmentation does that; in a different order, the others would come later in the epoch.
    """
    mine, its = rows_of(ours, number), rows_of(theirs, number)
    common = Counter(mine) & Counter(its)
    at_places = sum(one == other for one, other in zip(mine, its, strict=True))
    if common.total() < 2 or at_places != common.total():
        return None
    epoch = theirs.processes[0].steps[number].epoch
    same_epoch = (
        row
        for step in range(theirs.steps)
        if theirs.processes[0].steps[step].epoch == epoch
        for row in rows_of(theirs, step)
    )
    if {*(Counter(mine) - common)} & {*same_epoch}:
        return None
    return because(
        Cause.DATA,
        number,
        f"{at_places} of {len(mine)} examples are the same, at the same places, and the others "
        f"of {ours.name} are nowhere in this epoch of {theirs.name}",
        remedy="look at what is done to single examples: augmentation, and the generator that it "
        "draws from; files that differ; what is left out",
    )


def _size_of_data(run: Run) -> int | None:
    """Return the number of examples that the data loaders draw from, if they all say the same."""
    sizes = {loader.get("examples") for loader in run.processes[0].loaders}
    size = sizes.pop() if len(sizes) == 1 else None
    return size if isinstance(size, int) and size > 0 else None


def _repeats_its_order(run: Run) -> bool:
    """Return whether the second epoch has the batches of the first."""
    epochs: dict[int, list[Counter[str]]] = {}
    for number, step in enumerate(run.processes[0].steps[: run.steps]):
        epochs.setdefault(step.epoch, []).append(Counter(rows_of(run, number)))
    ordered: Sequence[list[Counter[str]]] = [*epochs.values()]
    if len(ordered) < 2 or not ordered[1] or not ordered[0][0]:
        return False
    length = min(len(ordered[0]), len(ordered[1]))
    return ordered[0][:length] == ordered[1][:length]


def _rates(ours: Run, theirs: Run, number: int) -> list[str]:
    rates = [
        [group.get("lr") for group in run.step(number)[0].settings][:1] for run in (ours, theirs)
    ]
    if not all(rates):
        return []
    if rates[0] == rates[1]:
        return [f"the learning rate is {rates[0][0]} in both"]
    return [f"the learning rate is {rates[0][0]} and {rates[1][0]}"]
