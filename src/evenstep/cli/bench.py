"""`evenstep bench`: is it faster on more devices, than whom, and where does the time go?"""

from __future__ import annotations

import dataclasses
import functools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
from evenstep.bench.lineup import counted
from evenstep.cli.columns import aligned
from evenstep.cli.display import print_line
from evenstep.cli.files import check_file, target_of
from evenstep.devices import usable_cores
from evenstep.errors import InputError
from evenstep.models.registry import find_factory
from evenstep.profiling.accounting import PARTS, whole_percents


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, how often, and where the results go."""

    model: str
    data: str
    data_dir: str | None
    shape: str
    classes: int
    batch_size: int
    shards: int
    rounds: int
    seconds: float
    steps: int | None
    json_file: str | None
    plot: str | None

    @property
    def job(self) -> dict[str, Any]:
        """What all contenders share, but for the number of steps."""
        return {
            "network": self.model,
            "data": self.data,
            "data_dir": self.data_dir,
            "shape": _whole_numbers("--shape", self.shape),
            "classes": self.classes,
            "examples": self.batch_size,
            "shards": self.shards,
        }


_AT_LEAST_1 = click.IntRange(min=1)
_WARMUP_SHARE = 0.1
_SCALING_HEAD = (
    *("devices", "batch", "examples/s", "least to most", "speed-up", "efficiency"),
    *("busy", "wait data", "wait others", "sum", "update"),
)
_PEERS_HEAD = ("", "examples/s", "least to most", "of evenstep's")

_OPTIONS = (
    click.option(
        "--model",
        default="lenet",
        show_default=True,
        help="lenet, resnet18, mlp, or package.module:factory, as for evenstep train.",
    ),
    click.option(
        "--data",
        type=click.Choice(["noise", "digits", "fashion-mnist"]),
        default="noise",
        show_default=True,
        help="What the batches are made of; the time does not depend on it.",
    ),
    click.option("--data-dir", metavar="DIR", help="The folder with the files of fashion-mnist."),
    click.option(
        "--shape",
        default="1,28,28",
        show_default=True,
        metavar="N,N,...",
        help="Of an example of noise.",
    ),
    click.option(
        "--classes", type=_AT_LEAST_1, default=10, show_default=True, help="Labels of noise."
    ),
    click.option(
        "--batch-size",
        type=_AT_LEAST_1,
        default=256,
        show_default=True,
        help="Examples of a minibatch.",
    ),
    click.option(
        "--shards", type=_AT_LEAST_1, default=8, show_default=True, help="V, for evenstep."
    ),
    click.option(
        "--rounds",
        type=_AT_LEAST_1,
        default=5,
        show_default=True,
        help="How often each is measured, each time in a fresh process.",
    ),
    click.option(
        "--seconds",
        type=click.FloatRange(min=0, min_open=True),
        default=3.0,
        show_default=True,
        help="About how long evenstep is measured each time; all take the same steps.",
    ),
    click.option("--steps", type=_AT_LEAST_1, help="Take so many steps instead."),
    click.option(
        "--json",
        "json_file",
        metavar="FILE",
        help="Write machine, versions and every repetition.",
    ),
    click.option(
        "--plot",
        metavar="FILE",
        help="Draw it: a .png or .svg (needs matplotlib).",
    ),
)


def _takes_plan(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command` the options of a `Plan`, and that as its argument `plan`."""

    @functools.wraps(command)
    def with_plan(**values: Any) -> Any:
        names = [field.name for field in dataclasses.fields(Plan)]
        return command(plan=Plan(**{name: values.pop(name) for name in names}), **values)

    return functools.reduce(lambda made, option: option(made), reversed(_OPTIONS), with_plan)


@click.group()
def bench() -> None:
    """Measure: more devices, or evenstep beside a plain loop, DDP, Accelerate and Fabric.

    Everything runs in fresh processes, in turns, so that a machine that gets slower or faster
    meanwhile does so for all. Tables show medians.
    """


@bench.command("scaling")
@_takes_plan
@click.option(
    "--devices",
    "wanted",
    metavar="N,N,...",
    help="Numbers of devices; by default 1, 2, 4 and so on, up to the cores.",
)
@click.option("--hybridize", is_flag=True, help="Compile the shards.")
def bench_scaling(plan: Plan, wanted: str | None, hybridize: bool) -> None:
    """Compare numbers of devices: the same batch, and one that grows with them.

    Where the time of the devices went is said too: busy with shards, waiting for data or for each
    other, summing, updating.
    """
    counts = _whole_numbers("--devices", wanted) if wanted else _doubling(usable_cores())
    if sorted(set(counts)) != counts or len(counts) < 2:
        raise InputError(f"got --devices {wanted}: give at least two, the least first, such as 1,2")

    def lineup(job: Mapping[str, Any]) -> list[Contender]:
        return scaling({**job, "hybridize": hybridize}, counts)

    document = _measure(plan, "scaling", lineup, counts[-1], pictures.draw_scaling)
    console = Console()
    for title, same in (("the same batch", True), ("a batch that grows", False)):
        print_line(console, "")
        print_line(console, Text(f"{title}:", "bold"))
        _print_table(
            console, [_SCALING_HEAD, *map(_scaling_row, scaled(document, same_batch=same))]
        )


@bench.command("peers")
@_takes_plan
@click.option(
    "--workers",
    type=click.IntRange(min=2),
    default=lambda: max(2, usable_cores()),
    show_default="the cores",
    help="Processes, or devices, of those who have several.",
)
def bench_peers(plan: Plan, workers: int) -> None:
    """Compare evenstep with a plain loop, DDP, Accelerate and Lightning Fabric.

    Each does the same work, as its own documentation says; those that are not installed are left
    out (pip install 'evenstep[bench]').
    """

    def lineup(job: Mapping[str, Any]) -> list[Contender]:
        return side_by_side(job, workers)

    if plan.batch_size % workers:
        raise InputError(
            f"got --batch-size {plan.batch_size} and --workers {workers}: the peers need a "
            f"batch that all can share alike"
        )
    document = _measure(plan, "peers", lineup, workers, pictures.draw_peers)
    _print_table(Console(), [_PEERS_HEAD, *_peers_rows(document)])


def _measure(
    plan: Plan,
    name: str,
    lineup: Callable[[Mapping[str, Any]], list[Contender]],
    workers: int,
    draw: Callable[[Mapping[str, Any], Path], None],
) -> Mapping[str, Any]:
    """Run the rounds of a benchmark, write what is to be written, return the results."""
    check_file("--json", plan.json_file)
    check_file("--plot", plan.plot)
    if plan.plot is not None:
        pictures.require_matplotlib()
    find_factory(plan.model)()
    try:
        steps = plan.steps or steps_for(plan.job, workers, plan.seconds)
        warmup_steps = max(1, round(_WARMUP_SHARE * steps))
        contenders = lineup({**plan.job, "steps": steps, "warmup_steps": warmup_steps})
        document = _run(plan, name, contenders)
    except RunFailedError as error:
        raise click.ClickException(f"a run of {plan.model} failed: {error.reason}") from error
    if plan.plot is not None:
        draw(document, Path(plan.plot))
    _say(
        f"{plan.model}: {counted(plan.rounds, 'round')} of {counted(steps, 'step')}, "
        f"{warmup_steps} of warm-up before"
    )
    return document


def _run(plan: Plan, name: str, contenders: list[Contender]) -> Mapping[str, Any]:
    """Run the rounds of those who are installed, saying how fast each is."""
    for absent in missing(contenders):
        _say(f"left out: {absent.label} ({absent.needs} is not installed)")
    contenders = [contender for contender in contenders if contender.is_there]
    record = Record(
        name,
        shlex.join(["evenstep", *sys.argv[1:]]),
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
        lambda run: _say(
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
    """Return a row for each contender, the fastest first; the last column is over evenstep."""
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


def _print_table(console: Console, rows: Sequence[Sequence[str]]) -> None:
    for number, line in enumerate(aligned(rows)):
        print_line(console, Text(line, "" if number else "bold"))


def _whole_numbers(option: str, text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise InputError(f"got {option} {text}: whole numbers with commas are needed, such as 1,2")
    return [int(part) for part in parts]


def _doubling(most: int) -> list[int]:
    """Return 1, 2, 4 and so on up to `most`, at least 1 and 2."""
    counts = [1]
    while 2 * counts[-1] <= max(2, most):
        counts.append(2 * counts[-1])
    return counts


def _say(line: str) -> None:
    click.echo(line, err=True)
