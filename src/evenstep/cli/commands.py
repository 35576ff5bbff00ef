"""The commands of `evenstep`: their options and their help.

What a command does is imported when it runs, because torch takes seconds to import: so `--help`,
shell completion and the check of options answer at once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path

import click

from evenstep.cli.options.bench import Plan
from evenstep.cli.options.completion import SuggestedList
from evenstep.cli.options.plan import PlanOptions
from evenstep.cli.options.table import GroupedCommand, GroupedOption, takes_options
from evenstep.cli.options.training import ExperimentOptions, LayoutOptions
from evenstep.cli.terminal.files import OutputFile
from evenstep.cli.terminal.loading import loading
from evenstep.limits import BOOK_EXPERIMENTS, MOST_DEVICES

_command = functools.partial(click.command, cls=GroupedCommand)
_compared = functools.partial(click.option, cls=GroupedOption, group="What is compared")
_as_json = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object and nothing else."
)


def _usable_cores() -> int:
    from evenstep.devices import usable_cores

    return usable_cores()


@_command(
    example="evenstep train --epochs 2 --checkpoint-dir runs/first --trace run.trace",
    prints="fingerprint    ...",
)
@takes_options(experiment=ExperimentOptions, layout=LayoutOptions)
def train(experiment: ExperimentOptions, layout: LayoutOptions) -> None:
    """Train a model (digits: seconds; fashion-mnist: minutes).

    The result is the same on any number of devices. Without options, LeNet learns to read
    handwritten digits. Without --epochs and --steps, training takes 30 epochs of digits or 10 of
    fashion-mnist. A resumed training keeps its options; its length, the folder of the data, and
    the options of devices, processes, checkpoints and output may change.
    """
    with loading("torch"):
        from evenstep.cli.training.command import train

    train(experiment, layout)


@_command(
    example="evenstep verify --steps 5 --devices 1,2",
    prints="identical: the same bits after each of 5 steps on 1 and 2 devices",
)
@takes_options(experiment=ExperimentOptions)
@_compared(
    "--devices",
    "wanted",
    default="1,2,3",
    show_default=True,
    metavar="N,N,...",
    help="Numbers of devices to compare, or sets of names joined by +, as in 1,cpu:0+cpu:1:own.",
)
@click.pass_context
def verify(context: click.Context, experiment: ExperimentOptions, wanted: str) -> None:
    """Compare results on several numbers of devices, bit for bit (seconds).

    Trains the same steps on each of them: 20 steps, unless --epochs or --steps is given. The exit
    code is 0 only if all results are equal. If they differ, the steps are replayed to find the
    first step, shard and tensor that differ.
    """
    with loading("torch"):
        from evenstep.cli.verify import verify

    context.exit(0 if verify(experiment, wanted) else 1)


@_command(
    example="evenstep explain run.trace --html timeline.html",
    prints="12 steps in ... s, ... ms each; ... s between them are not counted",
)
@click.argument("file", metavar="FILE", type=click.Path())
@_as_json
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE",
              help="Write a page with a timeline of the last steps.")  # fmt: skip
def explain(file: str, as_json: bool, html: Path | None) -> None:
    """Say where the time of a training went, and what would help.

    FILE was written by `evenstep train --trace FILE`. https://ui.perfetto.dev shows all of it as a
    timeline.
    """
    with loading("torch"):
        from evenstep.cli.traces.explain import explain

    explain(file, as_json=as_json, page=html)


@_command(
    example="evenstep export --checkpoint runs/first --out net.pt2",
    prints="max difference  ... on 64 test examples",
)
@click.option(
    "--checkpoint",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="A folder of checkpoints, whose newest one is exported, or one checkpoint in it.",
)
@click.option(
    "--out",
    required=True,
    metavar="FILE",
    type=OutputFile(),
    help="The file to write: .pt2 for evenstep.load_exported, or .onnx.",
)
def export(checkpoint: Path, out: str) -> None:
    """Write the model of a checkpoint into one file that runs without its Python source.

    The outputs of the file are compared with those of the model on examples of the test data.
    """
    with loading("torch"):
        from evenstep.cli.export import export

    export(checkpoint, out)


@_command(
    example="evenstep devices",
    prints="The number of devices does not change a result by a single bit. These do:",
)
def devices() -> None:
    """Show the devices of this machine, and what results depend on."""
    with loading("torch"):
        from evenstep.cli.machine.devices import devices

    devices()


@_command(
    example="evenstep doctor --model lenet",
    prints="lenet: all 23 operations are portable",
)
@_as_json
@click.option("--measure", is_flag=True,
              help="Measure what evenstep plan needs to know of this machine.")  # fmt: skip
@click.option("--model", metavar="MODEL",
              help="Say instead which operations of this model are portable.")  # fmt: skip
@click.option("--data", default="digits", show_default=True,
              type=click.Choice(["digits", "fashion-mnist"]),
              help="The data set to try that model with.")  # fmt: skip
@click.pass_obj
def doctor(
    environment: Mapping[str, str], as_json: bool, measure: bool, model: str | None, data: str
) -> None:
    """Say what is missing, what would change results or slow trainings down, and how to fix it."""
    with loading("torch"):
        from evenstep.cli.machine.doctor import doctor
        from evenstep.cli.machine.operations import operations
        from evenstep.cli.planning.machines import measure_machine

    if measure:
        measure_machine(as_json=as_json)
    elif model is None:
        doctor(environment, as_json=as_json)
    else:
        operations(model, data, as_json=as_json)


@_command(
    example="evenstep record --out one.rec train.py",
    prints="recording at most 100 steps, 1024 MB for each process",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--out", required=True, metavar="RECORD", type=click.Path(path_type=Path), help="A new folder."
)
@click.option("--steps", default=100, show_default=True, type=click.IntRange(1), metavar="N",
              help="Record at most so many updates.")  # fmt: skip
@click.option("--every", default=1, show_default=True, type=click.IntRange(1), metavar="N",
              help="Record only every so many updates.")  # fmt: skip
@click.option("--level", default="module", show_default=True,
              type=click.Choice(["step", "module", "operator"]),
              help="Keep steps only, also modules' calls, or also operators of torch.")  # fmt: skip
@click.option("--values", multiple=True, metavar="NAME",
              help="Keep values of this module's outputs or parameter's gradient, too (64 KiB of "
                   "each tensor); a pattern such as 'layer1.*', or several.")  # fmt: skip
@click.option("--batch-dim", default=0, show_default=True, type=click.IntRange(0), metavar="N",
              help="The dimension of tensors that counts examples (1 without batch_first=True)."
              )  # fmt: skip
@click.option("--limit-mb", default=1024, show_default=True, type=click.IntRange(1, 4096),
              metavar="MB", help="The largest file of a process.")  # fmt: skip
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def record(
    context: click.Context,
    out: Path,
    command: tuple[str, ...],
    *,
    steps: int,
    every: int,
    level: str,
    values: tuple[str, ...],
    batch_dim: int,
    limit_mb: int,
) -> None:
    """Run a script and record what it does, for `evenstep compare`.

    COMMAND is a script (train.py --epochs 1), or any command that trains with torch, in one process
    or several (torchrun --nproc-per-node 2 train.py). Neither the script nor a bit of its results
    is changed.
    """
    from evenstep.cli.records.record import record

    bounds = {"steps": steps, "every": every, "most_nbytes": limit_mb << 20}
    options = {"level": level, "values": values, "batch_dim": batch_dim, **bounds}
    environment: Mapping[str, str] = context.obj or os.environ  # as the user has set it
    context.exit(record(out, command, options, environment=environment))


@_command(
    example="evenstep compare one.rec two.rec",
    prints="they begin with different weights",
)
@click.argument("one", metavar="RECORD", type=click.Path(path_type=Path))
@click.argument("other", metavar="RECORD", type=click.Path(path_type=Path))
@_as_json
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE",
              help="Write a page that shows the two runs side by side.")  # fmt: skip
@click.pass_context
def compare(
    context: click.Context, one: Path, other: Path, *, as_json: bool, html: Path | None
) -> None:
    """Say where two recorded runs part first, and why.

    They may have other numbers of processes. The exit code is 0 if they are equal, or differ by
    rounding only.
    """
    from evenstep.cli.records.compare import compare

    context.exit(0 if compare(one, other, as_json=as_json, page=html) else 1)


@_command(
    example="evenstep reproduce --quick --only waiting",
    prints="waiting: sums: gain: ...",
)
@click.option(
    "--only",
    metavar="NAME,...",
    type=SuggestedList(BOOK_EXPERIMENTS),
    help=f"Run only these experiments, of {', '.join(BOOK_EXPERIMENTS)}.",
)
@click.option("--quick", is_flag=True, help="Run short versions, in less than five minutes.")
@click.option(
    "--data-dir",
    metavar="DIR",
    type=click.Path(),
    help="Folder with the files of Fashion-MNIST; without it they are downloaded.",
)
@click.option(
    "--out",
    default="reproduced",
    show_default=True,
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Folder for report.html and figures.json. Measurements that it already contains are not "
    "repeated, so the command can be interrupted and run again.",
)
def reproduce(only: str | None, quick: bool, data_dir: str | None, out: Path) -> None:
    """Run the book's experiments on this machine (hours; --quick: minutes).

    They are those of Dive into Deep Learning's chapter on performance. The report shows the book's
    figures beside this machine's, explains the differences, and draws the curves. On two cores
    everything takes hours, mostly for ResNet-18: start with --quick.
    """
    with loading("torch"):
        from evenstep.cli.reproduce import reproduce

    reproduce(only, quick=quick, data_dir=data_dir, out=out)


@click.command(
    cls=GroupedCommand,
    example="evenstep plan --model lenet --devices 1..4 --network 1Gbit --steps 2",
    prints="devices  machines  examples/s  from  to  speed-up  efficiency  ...",
)
@takes_options(options=PlanOptions)
def plan(options: PlanOptions) -> None:
    """Predict what more devices, a network or another number of shards would bring (seconds).

    Measures some steps on one device, or takes them from the trace of a training on one, and
    simulates the step on others. It says what binds, and what nobody has measured.
    """
    with loading("torch"):
        from evenstep.cli.planning.command import plan

    plan(options)


@click.group()
def bench() -> None:
    """Measure the speed: on more devices, or beside other libraries (minutes).

    Each measurement runs in a new process. The contenders take turns, so that a machine whose speed
    changes affects all of them. Tables show medians, and ratios are taken within each round. With
    --quick, the figures come sooner and vary more.
    """


@bench.command(
    "scaling",
    cls=GroupedCommand,
    example="evenstep bench scaling --devices 1,2 --quick",
    prints="devices  batch  examples/s  ...  speed-up  efficiency  busy  ...",
)
@_compared(
    "--devices",
    "wanted",
    metavar="N,N,...",
    help="Numbers of devices; by default 1, 2, 4 and so on, up to the number of cores.",
)
@_compared(
    *("--compile", "compiled"),
    is_flag=True,
    help="Compile the shards.",
)
@takes_options(plan=Plan)
def bench_scaling(plan: Plan, wanted: str | None, compiled: bool) -> None:
    """Compare numbers of devices, with the same batch and with one that grows with them.

    The table also shows where the time of the devices went: busy with shards, waiting for data or
    for each other, summing, updating.
    """
    with loading("torch"):
        from evenstep.cli.bench import scaling

    scaling(plan, wanted, compiled=compiled)


@bench.command(
    "peers",
    cls=GroupedCommand,
    example="evenstep bench peers --quick",
    prints="examples/s  least to most  of evenstep's",
)
@_compared(
    "--workers",
    type=click.IntRange(min=2, max=MOST_DEVICES),
    default=lambda: max(2, _usable_cores()),
    show_default="the cores",
    help="Number of processes or devices of each contender that uses several.",
)
@takes_options(plan=Plan)
def bench_peers(plan: Plan, workers: int) -> None:
    """Compare evenstep with a plain loop, DDP, Accelerate and Lightning Fabric.

    Each does the same work, written as in its own documentation. Those that are not installed are
    skipped (pip install 'evenstep[bench]').
    """
    with loading("torch"):
        from evenstep.cli.bench import peers

    peers(plan, workers)


@bench.command(
    "shards",
    cls=GroupedCommand,
    example="evenstep bench shards --numbers 2,16 --quick",
    prints="V  largest shard  examples/s  ...  over V = 8",
)
@_compared(
    "--numbers",
    "wanted",
    default="2,4,8,16",
    show_default=True,
    metavar="N,N,...",
    help="Numbers of shards, which are compared with --shards.",
)
@_compared(
    "--workers",
    type=click.IntRange(min=1, max=MOST_DEVICES),
    default=_usable_cores,
    show_default="the cores",
    help="Number of devices.",
)
@takes_options(plan=Plan)
def bench_shards(plan: Plan, wanted: str, workers: int) -> None:
    """Compare numbers of shards (V) on the same devices.

    Many small shards share out evenly over many devices, but each has a fixed cost. V belongs to
    the experiment: a different number of shards gives a different result.
    """
    with loading("torch"):
        from evenstep.cli.bench import shards

    shards(plan, wanted, workers)
