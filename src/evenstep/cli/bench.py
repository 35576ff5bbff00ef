"""`evenstep bench`: measures the speed on more devices, and beside other libraries."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from evenstep.bench import (
    Contender,
    Record,
    Scaled,
    Summary,
    against,
    installed,
    lineup,
    pictures,
    run_rounds,
    scaled,
    speeds,
    steps_for,
    summarise,
)
from evenstep.bench.fresh import RunFailedError
from evenstep.bench.workload import find_workload
from evenstep.cli.machine.load import cores_used_by_others
from evenstep.cli.options.bench import Plan, whole_numbers
from evenstep.cli.terminal.display import clock
from evenstep.cli.terminal.files import target_of
from evenstep.cli.terminal.output import command_line, numbers_table, print_line, print_table, say
from evenstep.devices import usable_cores
from evenstep.errors import InputError, counted
from evenstep.limits import MOST_DEVICES, MOST_SHARDS
from evenstep.profiling.accounting import PARTS, whole_percents

_WARMUP_SHARE = 0.1
_BUSY_CORES = 0.25  # less does not show in the medians
_SCALING_HEADS = (
    *("devices", "batch", "examples/s", "least to most", "speed-up", "efficiency"),
    *("busy", "wait data", "wait others", "sum", "update"),
)
_OURS = {"evenstep", "processes", "even_trainer"}  # the contenders that train with evenstep
_PEERS_HEADS = ("", "examples/s", "least to most", "of evenstep's")


def scaling(plan: Plan, wanted: str | None, *, compiled: bool) -> None:
    """Compare numbers of devices."""
    counts = whole_numbers("--devices", wanted) if wanted else _doubling(usable_cores())
    if counts[-1] > MOST_DEVICES:
        raise InputError(f"got --devices {wanted}: give at most {MOST_DEVICES}")
    if sorted(set(counts)) != counts or len(counts) < 2:
        raise InputError(f"got --devices {wanted}: give at least two, the least first, such as 1,2")
    document = _measure(
        plan,
        "scaling",
        lambda job: lineup.scaling({**job, "hybridize": compiled}, counts),
        counts[-1],
        pictures.draw_scaling,
    )
    console = Console()
    for title, same in (("the same batch", True), ("a batch that grows", False)):
        print_line(console, "")
        print_line(console, Text(f"{title}:", "bold"))
        rows = map(_scaling_row, scaled(document, same_batch=same))
        print_table(console, numbers_table(_SCALING_HEADS, rows))


def peers(plan: Plan, workers: int) -> None:
    """Compare evenstep with other libraries."""
    if plan.batch_size % workers:
        raise InputError(
            f"got --batch-size {plan.batch_size} and --workers {workers}: the other libraries need "
            f"a batch size that is a multiple of the number of workers"
        )
    document = _measure(
        plan, "peers", lambda job: lineup.side_by_side(job, workers), workers, pictures.draw_peers
    )
    print_table(Console(), numbers_table(_PEERS_HEADS, _peers_rows(document)))
    print_line(Console(), fastest_of(document))


def shards(plan: Plan, wanted: str, workers: int) -> None:
    """Compare numbers of shards on the same devices."""
    numbers = sorted({*whole_numbers("--numbers", wanted), plan.shards})
    if numbers[-1] > min(MOST_SHARDS, plan.batch_size):
        raise InputError(
            f"got --numbers {wanted} and --batch-size {plan.batch_size}: a batch has at most "
            f"{min(MOST_SHARDS, plan.batch_size)} shards with an example"
        )
    document = _measure(
        plan,
        "shards",
        lambda job: [lineup.devices(job, workers, shards=number) for number in numbers],
        workers,
        pictures.draw_peers,
    )
    heads = ("V", "largest shard", "examples/s", "least to most", f"over V = {plan.shards}")
    print_table(Console(), numbers_table(heads, _shards_rows(document, plan.shards)))


def _measure(
    plan: Plan,
    name: str,
    contenders_for: Callable[[Mapping[str, Any]], list[Contender]],
    workers: int,
    draw: Callable[[Mapping[str, Any], Path], None],
) -> Mapping[str, Any]:
    """Run the rounds of a benchmark, write the files, and return the results."""
    plan = plan.shortened()
    if plan.plot is not None:
        pictures.require_matplotlib()
    find_workload(plan.model).make_network()
    try:
        steps = plan.steps or steps_for(plan.job, workers, plan.seconds)
        warmup_steps = max(1, round(_WARMUP_SHARE * steps))
        contenders = contenders_for({**plan.job, "steps": steps, "warmup_steps": warmup_steps})
        document = _run(plan, name, contenders)
    except RunFailedError as error:
        raise click.ClickException(f"a run of {plan.model} failed: {error.reason}") from error
    if plan.plot is not None:
        draw(document, target_of(plan.plot))
    say(
        f"{plan.model}: {counted(plan.rounds, 'round')} of {counted(steps, 'step')}, "
        f"after {warmup_steps} of warm-up; ratios are taken within each round"
    )
    return document


def _run(plan: Plan, name: str, contenders: list[Contender]) -> Mapping[str, Any]:
    """Run the rounds of all contenders that are installed, and print the speed of each."""
    if note := busy_note(cores_used_by_others(), usable_cores()):
        say(f"note: {note}")
    contenders = installed(contenders, say)
    record = Record(
        name,
        command_line(),
        None if plan.json_file is None else target_of(plan.json_file),
        settings={"rounds": plan.rounds},
        contenders=[contender.described() for contender in contenders],
    )
    labels = {
        contender.key: f"{contender.label}, batch {contender.job['examples']}"
        for contender in contenders
    }
    began_s = time.monotonic()

    def show(run: Mapping[str, Any]) -> None:
        done, planned = len(record.document["runs"]), plan.rounds * len(contenders)
        left_s = (time.monotonic() - began_s) / done * (planned - done)
        say(
            f"round {run['round'] + 1} of {plan.rounds}  {clock(left_s)} left  "
            f"{run['examples_per_s']:9,.1f} examples/s  {labels[run['contender']]}"
        )

    run_rounds(contenders, plan.rounds, record, show)
    return record.document


def busy_note(used_cores: float | None, cores: int) -> str:
    """Return a line if other programs use so many of this process's cores; "" otherwise."""
    if used_cores is None or used_cores < _BUSY_CORES:
        return ""
    return (
        f"other programs use {used_cores:.1f} of {cores} cores, so all speeds are lower than on an "
        f"idle machine. The contenders take turns, and ratios are taken within each round: they "
        f"suffer less, but measure again when the machine is idle"
    )


def _scaling_row(row: Scaled) -> list[str]:
    percents = whole_percents(row.shares[part] for part in PARTS)
    return [
        str(row.devices),
        str(row.examples),
        *_speed_cells(row.speed),
        f"{row.speed_up.median:.2f}",
        f"{row.efficiency:.0%}",
        *(f"{percent}%" for percent in percents),
    ]


def _peers_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each contender, the fastest first."""
    ours = next(one["key"] for one in document["contenders"] if ".evenstep." in one["key"])
    rows = [
        (speed.median, [one["label"], *_speed_cells(speed), ratio])
        for one, speed, ratio in _compared(document, ours)
    ]
    return [row for _, row in sorted(rows, reverse=True)]


def fastest_of(document: Mapping[str, Any]) -> str:
    """Return a line that says whether anything else trains this model faster than evenstep.

    Compared are the fastest contender with evenstep and the fastest without, in each round.
    """
    found: dict[bool, list[tuple[float, Any]]] = {True: [], False: []}
    for one in document["contenders"]:
        if speed := [*speeds(document["runs"], one["key"]).values()]:
            found[one["library"] in _OURS].append((summarise(speed).median, one))
    ours, other = (max(found[side], key=lambda pair: pair[0])[1] for side in (True, False))
    ratio = against(document, ours["key"])[other["key"]]
    label, times = (
        other["label"],
        f"{ratio.median:.2f} times ({ratio.least:.2f} to {ratio.most:.2f})",
    )
    if ratio.least > 1:
        return (
            f"{label} trains this model faster, {times} as fast as {ours['label']}: use it where "
            f"speed matters more than the same bits on any number of devices"
        )
    if ratio.most > 1:
        return f"{label} is about as fast: {times} the speed of {ours['label']}"
    return f"evenstep is the fastest here: {label} has {times} the speed of {ours['label']}"


def _shards_rows(document: Mapping[str, Any], shards: int) -> list[list[str]]:
    """Return a row for each number of shards, with the speed over that of `shards`."""
    base = next(one["key"] for one in document["contenders"] if one["shards"] == shards)
    rows = []
    for one, speed, ratio in _compared(document, base):
        largest = str(math.ceil(one["examples"] / one["shards"]))
        rows.append([str(one["shards"]), largest, *_speed_cells(speed), ratio])
    return rows


def _compared(document: Mapping[str, Any], base: str) -> Iterator[tuple[Any, Summary, str]]:
    """Yield each contender, its speed, and the speed over that of contender `base`."""
    ratios = against(document, base)
    for one in document["contenders"]:
        speed = summarise([*speeds(document["runs"], one["key"]).values()])
        yield one, speed, f"{ratios[one['key']].median:.2f}"


def _speed_cells(speed: Summary) -> list[str]:
    return [f"{speed.median:,.1f}", f"{speed.least:,.1f} to {speed.most:,.1f}"]


def _doubling(most: int) -> list[int]:
    """Return 1, 2, 4 and so on up to `most`, at least 1 and 2."""
    return [2**exponent for exponent in range(max(2, most).bit_length())]
