"""The options of `evenstep plan`."""

# ruff: noqa: RUF009 (the functions called in the table return dataclass fields)

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import click

from evenstep.cli.options.completion import Suggested
from evenstep.cli.options.table import OptionTable, option
from evenstep.limits import (
    MODELS,
    MOST_EXAMPLES,
    MOST_IN_FLIGHT,
    MOST_SHARDS,
    TEXT_NETWORKS,
)

_NETWORKS = (*MODELS, *TEXT_NETWORKS)
_MOST_STEPS = 10_000

_of_work = functools.partial(option, group="What is trained")
_of_layout = functools.partial(option, group="On what")
_of_output = functools.partial(option, group="Output")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(OptionTable):
    """What is planned, on what, and where the results are written."""

    model: str = _of_work(
        "lenet", f"{', '.join(_NETWORKS)}, or package.module:factory.", Suggested(_NETWORKS)
    )
    trace_file: str | None = _of_work(
        None,
        "Take the times of a step from the trace of a training on one device, instead of measuring "
        "them now.",
        click.Path(),
        flag="--trace",
        metavar="FILE",
    )
    shape: str = _of_work("1,28,28", "Shape of an image.", metavar="N,N,...")
    batch_size: int | None = _of_work(
        None, "Examples in a batch; by default 256, or those of the trace.",
        click.IntRange(1, MOST_EXAMPLES),
    )  # fmt: skip
    shards: int | None = _of_work(
        None, "Number of shards; by default 8, or those of the trace.",
        click.IntRange(1, MOST_SHARDS),
    )  # fmt: skip
    steps: int = _of_work(6, "Steps to measure.", click.IntRange(1, _MOST_STEPS))
    devices: str = _of_layout("1..16", "Numbers of devices.", metavar="N..N|N,N,...")
    network: str = _of_layout(
        "10Gbit,50us",
        "What connects machines: a rate, and maybe a latency and the word shared, such as "
        "10Gbit,50us.",
        metavar="RATE,...",
    )
    per_machine: int | None = _of_layout(
        None, "Devices of a machine; by default those of this one.", click.IntRange(1, 1024)
    )
    per_process: int | None = _of_layout(
        None, "Devices of a process; by default all of a machine.", click.IntRange(1)
    )
    owners: bool = _of_layout(False, "Divide the optimizer's state among processes.")
    stages: int = _of_layout(1, "Divide the network into so many stages.", click.IntRange(1, 1024))
    slices: int | None = _of_layout(
        None,
        "Cut each layer into so many slices, which the devices of a process compute together.",
        click.IntRange(1, 1024),
    )
    in_flight: int = _of_layout(1, "Steps in flight.", click.IntRange(1, MOST_IN_FLIGHT))
    machine: Path | None = _of_layout(
        None,
        "What `evenstep doctor --measure --json` has printed, instead of measuring it now.",
        click.Path(path_type=Path),
        metavar="FILE",
    )
    compare: str | None = _of_output(
        None, "Put a run beside the plan: what evenstep train --json or --trace wrote.",
        click.Path(), metavar="FILE",
    )  # fmt: skip
    out: Path | None = _of_output(
        None, "Draw the plan as .svg, .png or .html (needs matplotlib).",
        click.Path(path_type=Path), metavar="FILE",
    )  # fmt: skip
    as_json: bool = _of_output(False, "Print one JSON object and nothing else.", flag="--json")
