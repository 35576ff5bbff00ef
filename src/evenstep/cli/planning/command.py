"""`evenstep plan`: a table of what more devices would bring, a picture, and a run beside it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from evenstep.bench.results import write_text
from evenstep.bench.workload import Job, find_workload
from evenstep.cli.options.bench import whole_numbers
from evenstep.cli.options.plan import PlanOptions
from evenstep.cli.planning.machines import described_machine, read_machine
from evenstep.cli.planning.measuring import fixed_s, measured_machine, measured_work
from evenstep.cli.planning.pictures import draw_plan, page_of_plan
from evenstep.cli.terminal.output import numbers_table, print_line, print_table, say
from evenstep.errors import InputError, counted, shown
from evenstep.limits import MOST_DEVICES
from evenstep.nn import slice_
from evenstep.planning import (
    Comparison,
    Machine,
    Plan,
    Prediction,
    Work,
    compared,
    measured_run,
    parse_network,
    work_of_trace,
)
from evenstep.planning import plan as planned
from evenstep.planning.described import Divide
from evenstep.planning.plan import MOST_PLANNED

_RANGE = re.compile(r"\s*0*([1-9]\d{0,8})\s*\.\.\s*0*([1-9]\d{0,8})\s*")
_MOST_ROWS = 40
_HEADS = (
    *("devices", "machines", "examples/s", "from", "to", "speed-up", "efficiency"),
    *("MiB a device", "computing", "waiting", "exchange", "end", "binds"),
)


def plan(options: PlanOptions) -> None:
    """Print what more devices would bring."""
    counts = device_counts(options.devices)
    refuse(options, counts)
    run = None if options.compare is None else measured_run(options.compare)
    work, machine = _inputs(options)
    known = "network" not in options.given and math.isfinite(machine.network.bytes_per_s)
    found = planned(
        work,
        devices=counts,
        machine=machine,
        network=None if known else options.network,
        per_machine=options.per_machine,
        per_process=options.per_process,
        divide=_divided(options),
        stages=options.stages,
        shards=options.shards,
        batch_size=options.batch_size,
        in_flight=options.in_flight,
        sockets=options.owners,
    )
    beside = None
    if run is not None:
        beside = compared(found.work, found.predictions, run)
    if options.out is not None:
        _draw(found, options.out)
    if options.as_json:
        more = {} if beside is None else {"compared": dataclasses.asdict(beside)}
        click.echo(json.dumps({**found.to_json(), **more}, allow_nan=False))
    else:
        _print(Console(), found, beside)


def _divided(options: PlanOptions) -> Divide:
    if options.slices:
        return "slices"
    return "stages" if options.stages > 1 else "owners" if options.owners else "data"


def device_counts(text: str) -> list[int]:
    """Return the numbers that "1..16" (at most 40 of them) or "1,2,4" names."""
    if between := _RANGE.fullmatch(text):
        first, last = int(between[1]), int(between[2])
        if first > last:
            raise InputError(f"got --devices {shown(text)}: give the smaller number first")
        counts = list(range(first, min(last, first + _MOST_ROWS - 1) + 1))
        if last - first >= _MOST_ROWS:  # powers of two, and the last
            powers = [2**n for n in range(31) if first <= 2**n <= last]
            counts = sorted({first, *powers, last})
    elif ".." in text:
        raise InputError(
            f"got --devices {shown(text)}: write a range as two numbers, such as 1..16"
        )
    else:
        counts = sorted(set(whole_numbers("--devices", text)))
    if len(counts) > _MOST_ROWS or counts[-1] > MOST_PLANNED:
        raise InputError(
            f"got --devices {shown(text)}: give at most {_MOST_ROWS} numbers, up to "
            f"{MOST_PLANNED:,}"
        )
    return counts


def refuse(options: PlanOptions, counts: list[int]) -> None:
    """Refuse what evenstep can't do, by name.

    Raises:
        InputError: the options can't be combined, or name more than there can be.
    """
    parse_network(options.network)
    given = {"--stages": options.stages > 1, "--slices": options.slices, "--owners": options.owners}
    first, second, *_ = [*(name for name, one in given.items() if one), "", ""]
    if second:
        raise InputError(f"got {first} and {second}: a plan is for one of them, so leave one out")
    if options.slices and options.in_flight > 1:
        raise InputError(
            f"got --slices and --in-flight {options.in_flight}: devices that compute slices "
            f"together have one step in flight, so leave one out"
        )
    if options.slices and options.trace_file is not None:
        raise InputError(
            "got --slices and --trace: a trace does not hold what of a shard is in slices, so give "
            "--model instead"
        )
    inside = options.per_process or options.per_machine or 1
    if inside > MOST_DEVICES:
        raise InputError(
            f"got {inside} devices of a process: a process has at most {MOST_DEVICES} devices, so "
            f"give a smaller --per-process"
        )
    if options.trace_file is not None and "model" in options.given:
        raise InputError("got --trace and --model: the trace says what is trained; leave one out")
    if options.shards is not None and options.shards < min(counts):
        raise InputError(
            f"got --shards {options.shards} and --devices {shown(options.devices)}: devices beyond "
            f"the number of shards get no work, so give at least {min(counts)} shards"
        )


def _inputs(options: PlanOptions) -> tuple[Work, Machine]:
    """Return the work and the machine: from files, or measured now."""
    given = None if options.machine is None else read_machine(options.machine)
    if options.trace_file is not None:
        return work_of_trace(options.trace_file), given or described_machine(options.per_machine)
    _check_cuts(options, find_workload(options.model).make_network())
    examples = options.batch_size or 256
    job = Job(
        network=options.model,
        examples=examples,
        shape=whole_numbers("--shape", options.shape),
        shards=min(options.shards or 8, examples),
        warmup_steps=3,
        steps=options.steps,
        memory_format="preserve",
        slices=options.slices or 0,
    )
    say(f"measuring {options.model}: {counted(options.steps, 'step')} on one device")
    work = measured_work(job)
    work = dataclasses.replace(work, fixed_s=fixed_s(job, work))
    return work, given or measured_machine(job)


def _check_cuts(options: PlanOptions, model: Any) -> None:
    """Check that a model can be cut into the slices or stages.

    Raises:
        ModelError, InputError: it can't be.
    """
    if options.slices:
        slice_(model, options.slices)
    parts = sum(1 for one in model.modules() if any(True for _ in one.parameters(recurse=False)))
    if options.stages > max(parts, 1):
        raise InputError(
            f"got --stages {options.stages}: {options.model} has {parts} modules with parameters, "
            f"and each stage needs one"
        )


def _draw(found: Plan, file: Path) -> None:
    if file.suffix == ".html":
        write_text(file, page_of_plan(found))
    else:
        draw_plan(found, file)


def _print(console: Console, found: Plan, beside: Comparison | None) -> None:
    work = found.work
    print_line(
        console,
        f"{work.name}, batches of {work.examples:,}, V = {work.shards}: a shard takes "
        f"{work.usual_s * 1e3:,.2f} ms on one device, the median of {len(work.shard_s)}",
    )
    print_line(console, "")
    print_table(console, numbers_table(_HEADS, map(_row, found.predictions)))
    for text in said(found, beside):
        print_line(console, text)


def said(found: Plan, beside: Comparison | None = None) -> Iterator[str]:
    """Yield the lines under the table."""
    yield ""
    last = found.predictions[-1]
    for text in last.reasons:
        yield f"{counted(last.arrangement.devices, 'device')}: {text}"
    if last.arrangement.devices > 1:
        yield (
            f"more than {counted(found.pays_until, 'device')} are not worth it: twice as many "
            f"bring less than 10%"
            if found.pays_until < last.arrangement.devices
            else f"up to {counted(found.pays_until, 'device')}, more devices pay"
        )
    yield from found.advice
    if last.fits is False:
        yield f"{counted(last.arrangement.devices, 'device')} don't have enough memory"
    for text in found.unseen:
        yield f"not seen: {text}"
    if beside is not None:
        inside = "inside" if beside.within else "outside"
        parts = f" in {beside.processes} processes" if beside.processes > 1 else ""
        yield (
            f"the run on {counted(beside.devices, 'device')}{parts}: "
            f"{beside.measured:,.1f} examples/s, "
            f"predicted {beside.predicted:,.1f} ({beside.error:+.1%}), {inside} the range"
        )


def _row(one: Prediction) -> list[str]:
    return [
        str(one.arrangement.devices),
        str(one.arrangement.machines),
        *(f"{value:,.1f}" for value in (one.examples_per_s, one.least, one.most)),
        f"{one.speed_up:.2f}",
        f"{one.efficiency:.0%}",
        f"{one.memory_nbytes / 2**20:,.0f}{'' if one.fits is not False else ' (too much)'}",
        *(f"{share:.0%}" for share in one.shares.values()),
        one.binds,
    ]
