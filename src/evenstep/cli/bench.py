"""`evenstep bench`: measures the speed on more devices, and beside other libraries."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.text import Text

from evenstep.bench import (
    Contender,
    Record,
    Scaled,
    against,
    missing,
    pictures,
    run_rounds,
    scaled,
    scaling,
    side_by_side,
    speeds,
    steps_for,
    summarise,
)
from evenstep.bench.fresh import RunFailedError
from evenstep.bench.lineup import counted, devices
from evenstep.bench.workload import find_workload
from evenstep.bench.workload.kinds import NETWORKS
from evenstep.cli.files import OutputFile, target_of
from evenstep.cli.option_table import OptionTable, option, takes_options
from evenstep.cli.options import Finite
from evenstep.cli.output import command_line, numbers_table, print_line, print_table, say
from evenstep.data.loader import MOST_EXAMPLES
from evenstep.devices import usable_cores
from evenstep.devices.discovery import MOST_DEVICES
from evenstep.errors import InputError, shown
from evenstep.experiment import MOST_SHARDS
from evenstep.profiling.accounting import PARTS, whole_percents
from evenstep.training.arguments import MOST_SECONDS

_WARMUP_SHARE = 0.1
_MOST_NUMBERS = 2**30
_SCALING_HEADS = (
    *("devices", "batch", "examples/s", "least to most", "speed-up", "efficiency"),
    *("busy", "wait data", "wait others", "sum", "update"),
)
_PEERS_HEADS = ("", "examples/s", "least to most", "of evenstep's")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(OptionTable):
    """What is measured, how often, and where the results are written."""

    model: str = option("lenet", f"{', '.join(NETWORKS)}, or package.module:factory.")
    data: Literal["noise", "digits", "fashion-mnist"] = option(
        "noise", "Images in the batches; they do not affect the time."
    )
    data_dir: str | None = option(None, "Folder with the files of fashion-mnist.", metavar="DIR")
    shape: str = option("1,28,28", "Shape of an example of noise.", metavar="N,N,...")
    classes: int = option(10, "Number of classes of noise.", click.IntRange(1, 2**31 - 1))
    batch_size: int = option(256, "Examples in a batch.", click.IntRange(1, MOST_EXAMPLES))
    shards: int = option(8, "Number of shards, for evenstep.", click.IntRange(1, MOST_SHARDS))
    rounds: int = option(5, "Number of measurements of each, every one in a new process.")
    seconds: float = option(
        3.0,
        "Approximate length of a measurement of evenstep; the others do as many steps.",
        Finite(min=0, min_open=True, max=MOST_SECONDS),
    )
    steps: int | None = option(None, "Number of steps, instead of --seconds.")
    json_file: str | None = option(
        None, "Write machine, versions and all measurements as JSON.", OutputFile(), flag="--json"
    )
    plot: str | None = option(
        None, "Draw the results as .png or .svg (needs matplotlib).", OutputFile()
    )

    @property
    def job(self) -> dict[str, Any]:
        """The settings that all contenders share, without the number of steps.

        Raises:
            InputError: a batch of noise would be too large.
        """
        numbers = math.prod(_whole_numbers("--shape", self.shape)) * self.batch_size
        if self.data == "noise" and numbers > _MOST_NUMBERS:
            raise InputError(
                f"got --shape {shown(self.shape)} and --batch-size {self.batch_size}: a batch of "
                f"noise may have at most {_MOST_NUMBERS} numbers (4 GiB)"
            )
        return {
            "network": self.model,
            "data": self.data,
            "data_dir": self.data_dir,
            "shape": _whole_numbers("--shape", self.shape),
            "classes": self.classes,
            "examples": self.batch_size,
            "shards": self.shards,
        }


@click.group()
def bench() -> None:
    """Measure the speed on more devices, or beside a plain loop, DDP, Accelerate and Fabric.

    Each measurement runs in a new process. The contenders take turns, so that a machine whose speed
    changes affects all of them. Tables show medians.
    """


@bench.command("scaling")
@takes_options(plan=Plan)
@click.option(
    "--devices",
    "wanted",
    metavar="N,N,...",
    help="Numbers of devices; by default 1, 2, 4 and so on, up to the number of cores.",
)
@click.option("--compile", "compiled", is_flag=True, help="Compile the shards.")
def bench_scaling(plan: Plan, wanted: str | None, compiled: bool) -> None:
    """Compare numbers of devices, with the same batch and with one that grows with them.

    The table also shows where the time of the devices went: busy with shards, waiting for data or
    for each other, summing, updating.
    """
    counts = _whole_numbers("--devices", wanted) if wanted else _doubling(usable_cores())
    if counts[-1] > MOST_DEVICES:
        raise InputError(f"got --devices {wanted}: give at most {MOST_DEVICES}")
    if sorted(set(counts)) != counts or len(counts) < 2:
        raise InputError(f"got --devices {wanted}: give at least two, the least first, such as 1,2")
    document = _measure(
        plan,
        "scaling",
        lambda job: scaling({**job, "hybridize": compiled}, counts),
        counts[-1],
        pictures.draw_scaling,
    )
    console = Console()
    for title, same in (("the same batch", True), ("a batch that grows", False)):
        print_line(console, "")
        print_line(console, Text(f"{title}:", "bold"))
        rows = map(_scaling_row, scaled(document, same_batch=same))
        print_table(console, numbers_table(_SCALING_HEADS, rows))


@bench.command("peers")
@takes_options(plan=Plan)
@click.option(
    "--workers",
    type=click.IntRange(min=2, max=MOST_DEVICES),
    default=lambda: max(2, usable_cores()),
    show_default="the cores",
    help="Number of processes or devices of each contender that uses several.",
)
def bench_peers(plan: Plan, workers: int) -> None:
    """Compare evenstep with a plain loop, DDP, Accelerate and Lightning Fabric.

    Each does the same work, written as in its own documentation. Those that are not installed are
    skipped (pip install 'evenstep[bench]').
    """
    if plan.batch_size % workers:
        raise InputError(
            f"got --batch-size {plan.batch_size} and --workers {workers}: the other libraries need "
            f"a batch size that is a multiple of the number of workers"
        )
    document = _measure(
        plan, "peers", lambda job: side_by_side(job, workers), workers, pictures.draw_peers
    )
    print_table(Console(), numbers_table(_PEERS_HEADS, _peers_rows(document)))


@bench.command("shards")
@takes_options(plan=Plan)
@click.option(
    "--numbers",
    "wanted",
    default="2,4,8,16",
    show_default=True,
    metavar="N,N,...",
    help="Numbers of shards, which are compared with --shards.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1, max=MOST_DEVICES),
    default=usable_cores,
    show_default="the cores",
    help="Number of devices.",
)
def bench_shards(plan: Plan, wanted: str, workers: int) -> None:
    """Compare numbers of shards (V) on the same devices.

    Many small shards share out evenly over many devices, but each has a fixed cost. V belongs to
    the experiment: another number of shards gives another result.
    """
    numbers = sorted({*_whole_numbers("--numbers", wanted), plan.shards})
    if numbers[-1] > min(MOST_SHARDS, plan.batch_size):
        raise InputError(
            f"got --numbers {wanted} and --batch-size {plan.batch_size}: a batch has at most "
            f"{min(MOST_SHARDS, plan.batch_size)} shards with an example"
        )
    document = _measure(
        plan,
        "shards",
        lambda job: [devices(job, workers, shards=number) for number in numbers],
        workers,
        pictures.draw_peers,
    )
    heads = ("V", "largest shard", "examples/s", "least to most", f"over V = {plan.shards}")
    print_table(Console(), numbers_table(heads, _shards_rows(document, plan.shards)))


def _measure(
    plan: Plan,
    name: str,
    lineup: Callable[[Mapping[str, Any]], list[Contender]],
    workers: int,
    draw: Callable[[Mapping[str, Any], Path], None],
) -> Mapping[str, Any]:
    """Run the rounds of a benchmark, write the files, and return the results."""
    if plan.plot is not None:
        pictures.require_matplotlib()
    find_workload(plan.model).make_network()
    try:
        steps = plan.steps or steps_for(plan.job, workers, plan.seconds)
        warmup_steps = max(1, round(_WARMUP_SHARE * steps))
        contenders = lineup({**plan.job, "steps": steps, "warmup_steps": warmup_steps})
        document = _run(plan, name, contenders)
    except RunFailedError as error:
        raise click.ClickException(f"a run of {plan.model} failed: {error.reason}") from error
    if plan.plot is not None:
        draw(document, target_of(plan.plot))
    say(
        f"{plan.model}: {counted(plan.rounds, 'round')} of {counted(steps, 'step')}, "
        f"after {warmup_steps} of warm-up"
    )
    return document


def _run(plan: Plan, name: str, contenders: list[Contender]) -> Mapping[str, Any]:
    """Run the rounds of all contenders that are installed, and print the speed of each."""
    for absent in missing(contenders):
        say(f"left out: {absent.label} ({absent.needs} is not installed)")
    contenders = [contender for contender in contenders if contender.is_installed]
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
    run_rounds(
        contenders,
        plan.rounds,
        record,
        lambda run: say(
            f"round {run['round'] + 1} of {plan.rounds}  "
            f"{run['examples_per_s']:9,.1f} examples/s  {labels[run['contender']]}"
        ),
    )
    return record.document


def _scaling_row(row: Scaled) -> list[str]:
    percents = whole_percents(row.shares[part] for part in PARTS)
    return [
        str(row.devices),
        str(row.examples),
        f"{row.speed.median:,.1f}",
        f"{row.speed.least:,.1f} to {row.speed.most:,.1f}",
        f"{row.speed_up.median:.2f}",
        f"{row.efficiency:.0%}",
        *(f"{percent}%" for percent in percents),
    ]


def _peers_rows(document: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each contender, the fastest first."""
    contenders = document["contenders"]
    ours = next(one["key"] for one in contenders if ".evenstep." in one["key"])
    ratios = against(document, ours)
    rows = []
    for one in contenders:
        speed = summarise(list(speeds(document["runs"], one["key"]).values()))
        spread = f"{speed.least:,.1f} to {speed.most:,.1f}"
        ratio = f"{ratios[one['key']].median:.2f}"
        rows.append((speed.median, [one["label"], f"{speed.median:,.1f}", spread, ratio]))
    return [row for _, row in sorted(rows, reverse=True)]


def _shards_rows(document: Mapping[str, Any], shards: int) -> list[list[str]]:
    """Return a row for each number of shards, with the speed over that of `shards`."""
    contenders = document["contenders"]
    ratios = against(document, next(one["key"] for one in contenders if one["shards"] == shards))
    rows = []
    for one in contenders:
        speed = summarise(list(speeds(document["runs"], one["key"]).values()))
        rows.append(
            [
                str(one["shards"]),
                str(math.ceil(one["examples"] / one["shards"])),
                f"{speed.median:,.1f}",
                f"{speed.least:,.1f} to {speed.most:,.1f}",
                f"{ratios[one['key']].median:.2f}",
            ]
        )
    return rows


def _whole_numbers(option: str, text: str) -> list[int]:
    parts = text.split(",")
    if not all(re.fullmatch(r"\s*0*[1-9]\d{0,9}\s*", part) for part in parts):
        raise InputError(
            f"got {option} {shown(text)}: expected whole numbers with commas, such as 1,2"
        )
    return [int(part) for part in parts]


def _doubling(most: int) -> list[int]:
    """Return 1, 2, 4 and so on up to `most`, at least 1 and 2."""
    return [2**exponent for exponent in range(max(2, most).bit_length())]
