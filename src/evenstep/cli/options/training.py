"""The options of `evenstep train` and `evenstep verify`: tables for experiment and layout."""

# ruff: noqa: RUF009 (the functions called in the tables return dataclass fields)

from __future__ import annotations

import dataclasses
import functools
import math
import re
from pathlib import Path
from typing import Any, Literal

import click

from evenstep.cli.options.completion import Suggested, SuggestedList
from evenstep.cli.options.table import OptionTable, Scope, option
from evenstep.cli.terminal.files import FolderName, OutputFile, OutputFolder
from evenstep.limits import (
    MODELS,
    MOST_EXAMPLES,
    MOST_IN_FLIGHT,
    MOST_SECONDS,
    MOST_SHARDS,
    MOST_THREADS,
    Arithmetic,
    BatchNorm,
    MemoryFormat,
    Precision,
)


class Stages(click.ParamType[str | dict[str, int]]):
    """`balanced`, `balanced:2`, `balanced:time`, or the stage that each module begins."""

    name = "stages"

    def convert(self, value: Any, *arguments: Any) -> str | dict[str, int]:
        """Return what `evenstep.Stages` takes; fail for other text."""
        if isinstance(value, dict) or re.fullmatch(r"balanced(:[1-9]\d*)?(:time)?", value):
            return value  # type: ignore[no-any-return]
        pairs = [part.rpartition("=") for part in value.split(",")]
        try:
            stages = {name: int(stage) for name, _, stage in pairs}
        except ValueError:
            stages = {}
        if "" in stages or len(stages) < len(pairs):  # no list, or a module named twice
            self.fail(
                f"{value!r} is none of balanced, balanced:2, balanced:time, balanced:2:time, or a "
                f"list of different modules and their stages, such as features=0,classifier=1.",
                *arguments,
            )
        return stages


class Finite(click.FloatRange):
    """A finite number in a range."""

    def convert(self, *arguments: Any) -> Any:
        """Return the number; fail for NaN and infinity."""
        if not math.isfinite(value := super().convert(*arguments)):
            self.fail(f"{value} is not a finite number.", *arguments[1:])
        return value


_MOST_PROCESSES, _MOST_RESTARTS = 1024, 10**6
_MOST_RATE = 1e30  # far above any sense, and representable in 32 bits

_DATA, _TRAINING = "Model and data", "Training"
_ARITHMETIC = "Shards and arithmetic"
_DEVICES = "Devices and processes (the result does not depend on them)"
_CHECKPOINTS, _OUTPUT = "Checkpoints", "Output"

_in_run_file = functools.partial(option, scope=Scope.RUN_FILE)
_in_checkpoint = functools.partial(option, scope=Scope.CHECKPOINT)
_replaceable = functools.partial(option, None, scope=Scope.REPLACEABLE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentOptions(OptionTable):
    """What is trained and for how long: the options that a result depends on."""

    model: str = _in_run_file(
        "lenet",
        f"{', '.join(MODELS)}, or package.module:factory, where factory is a function without "
        "arguments that returns a torch.nn.Module. The current folder is searched too.",
        Suggested(MODELS),
        group=_DATA,
    )
    data: Literal["digits", "fashion-mnist"] = _in_run_file(
        "digits", "digits comes with evenstep; fashion-mnist is downloaded once.", group=_DATA
    )
    data_dir: str | None = _replaceable(
        "Folder with the four files of fashion-mnist, instead of a download.",
        click.Path(),
        metavar="DIR",
        group=_DATA,
    )
    shards: int = _in_checkpoint(
        8,
        "Number of shards that each batch is split into; part of the experiment.",
        click.IntRange(min=1, max=MOST_SHARDS),
        group=_ARITHMETIC,
    )
    batch_size: int = _in_run_file(
        256,
        "Examples in a batch, over all devices.",
        click.IntRange(min=1, max=MOST_EXAMPLES),
        group=_DATA,
    )
    drop_last: bool = _in_run_file(
        False, "Skip an epoch's last batch if it is shorter.", group=_DATA
    )
    lr: float = _in_run_file(
        0.1, "Learning rate of SGD.", Finite(min=0, max=_MOST_RATE), group=_TRAINING
    )
    momentum: float = _in_run_file(
        0.0, "Momentum of SGD.", Finite(min=0, max=_MOST_RATE), group=_TRAINING
    )
    precision: Precision = _in_checkpoint(
        "fp32", "bf16 computes under autocast; part of the experiment.", group=_ARITHMETIC
    )
    arithmetic: Arithmetic = _in_checkpoint(
        "torch",
        "portable computes with the same bits on every processor, by evenstep's own kernels, on "
        "CPUs; part of the experiment.",
        group=_ARITHMETIC,
    )
    memory_format: MemoryFormat = _in_checkpoint(
        "preserve",
        "Memory format of images; preserve leaves them as they are.",
        group=_ARITHMETIC,
    )
    threads: int = _in_checkpoint(
        1,
        "Threads of each CPU device; part of the experiment.",
        click.IntRange(min=1, max=MOST_THREADS),
        group=_ARITHMETIC,
    )
    compile: bool = _in_checkpoint(
        False,
        "Compile the forward and backward pass of a shard with torch.compile, on CPUs; part of the "
        "experiment.",
        group=_ARITHMETIC,
    )
    batch_norm: BatchNorm = _in_checkpoint(
        "shard",
        "Statistics that BatchNorm layers use in training: those of each shard, or those of the "
        "whole batch (sync); part of the experiment.",
        group=_ARITHMETIC,
    )
    clip_norm: float | None = _in_checkpoint(
        None,
        "Scale a batch's gradient down to this norm if it is larger; part of the experiment.",
        Finite(min=0, min_open=True),
        metavar="NORM",
        group=_TRAINING,
    )
    epochs: int | None = _replaceable("Stop after N epochs.", group=_TRAINING)
    steps: int | None = _replaceable(
        "Stop after N steps, counted from the start of the training. If --epochs is given too, "
        "training stops at whichever comes first.",
        group=_TRAINING,
    )
    seed: int = _in_checkpoint(
        0,
        "Seed of the weights, of the order of the data and of random operations in the model.",
        click.IntRange(min=0, max=2**63 - 1),
        group=_TRAINING,
    )

    def target_steps(self, epoch_steps: int, *, default: int) -> int:
        """Return the step at which training ends; `default` without --steps and --epochs."""
        limits = [self.steps, self.epochs and self.epochs * epoch_steps]
        return min((limit for limit in limits if limit is not None), default=default)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutOptions(OptionTable):
    """Where and how `evenstep train` runs: the options that a result does not depend on."""

    devices: str = option(
        "auto",
        "auto: all GPUs, or if there is none, a CPU device for each core; N: a number of devices; "
        "LIST: names, such as cpu:0,cpu:1.",
        SuggestedList(("auto", "1", "2", "4", "cpu:0", "cpu:1", "cuda:0", "cuda:1")),
        argument="devices",
        metavar="auto|N|LIST",
        group=_DEVICES,
    )
    checkpoint_dir: Path | None = option(
        None,
        "Save checkpoints here: after every epoch, at the end, and when training is stopped.",
        FolderName(),
        metavar="DIR",
        group=_CHECKPOINTS,
    )
    checkpoint_every: int | None = option(
        None,
        "Save after every this many steps, instead of after every epoch.",
        metavar="STEPS",
        group=_CHECKPOINTS,
    )
    in_flight: int = option(
        1,
        "Number of steps in flight: with 2, the next batch is loaded and copied while a step is "
        "computed.",
        click.IntRange(min=1, max=MOST_IN_FLIGHT),
        argument="max_in_flight",
        metavar="STEPS",
        group=_DEVICES,
    )
    stages: str | dict[str, int] | None = option(
        None,
        "Divide the network among the devices, as a pipeline: balanced (a stage of equal bytes for "
        "each device), balanced:time (of equal times), balanced:2 (two stages), or LIST: the "
        "modules that begin the stages, such as features=0,classifier=1.",
        Stages(),
        argument="stages",
        metavar="balanced|LIST",
        group=_DEVICES,
    )
    owners: bool = option(
        False,
        "Each parameter has one owner, a process, which alone keeps its gradient and its optimizer "
        "state, and updates it.",
        argument="owners",
        group=_DEVICES,
    )
    log_dir: Path | None = option(
        None,
        "Log every step here, for TensorBoard and as log.csv, and the test accuracy after each "
        "epoch.",
        OutputFolder(),
        metavar="DIR",
        group=_OUTPUT,
    )
    trace_file: str | None = option(
        None,
        "Write a timeline of all devices, for evenstep explain, Perfetto and chrome://tracing.",
        OutputFile(),
        flag="--trace",
        group=_OUTPUT,
    )
    max_restarts: int = option(
        0,
        "With --processes: how many times to restart from the last checkpoint if a process fails.",
        click.IntRange(min=0, max=_MOST_RESTARTS),
        metavar="N",
        group=_DEVICES,
    )
    processes: int = option(
        1,
        "Number of processes on this machine, each with its own --devices (torchrun starts more).",
        click.IntRange(min=1, max=_MOST_PROCESSES),
        group=_DEVICES,
    )
    timeout_s: float = option(
        60.0,
        "How long a process waits for another one before it reports which one is late, and exits.",
        Finite(min=0, min_open=True, max=MOST_SECONDS),
        flag="--timeout",
        argument="peer_timeout_s",
        metavar="SECONDS",
        group=_DEVICES,
    )
    secret_file: Path | None = option(
        None,
        "With several processes: the file with the job's secret, which a process must know to "
        "join. Default: the one that EVENSTEP_SECRET_FILE names; a random secret with --processes.",
        click.Path(path_type=Path),
        metavar="FILE",
        group=_DEVICES,
    )
    allow_rounding: bool = option(
        False,
        "With several processes: train although their processors, libraries or settings round "
        "differently; results are then equal within rounding, not bit for bit.",
        argument="allow_rounding",
        group=_DEVICES,
    )
    resume: bool = option(False, "Resume from the newest checkpoint in DIR.", group=_CHECKPOINTS)
    auto_resume: bool = option(
        False,
        "Resume from the newest undamaged checkpoint in DIR, or start anew if there is none: for "
        "jobs that a cluster restarts.",
        group=_CHECKPOINTS,
    )
    json_file: str | None = option(
        None,
        "Write the results as JSON to this file. With -, they go to stdout and everything else to "
        "stderr.",
        OutputFile(may_be_stream=True),
        flag="--json",
        group=_OUTPUT,
    )


def spell_options(message: str) -> str:
    """Replace Python arguments in a message of the library by options of the command line.

    "use shards=12" becomes "use --shards 12", "Experiment(compile=True)" becomes "--compile", and
    "Stages('balanced')" becomes "--stages balanced".
    """
    message = message.replace("Trainer.trace.save", "evenstep train --trace FILE")
    message = message.replace("as data_dir", "as --data-dir")
    message = re.sub(r"Layout\(divide=(\w+\(.*?\))\)", r"\1", message).replace(
        "Owners()", "--owners"
    )
    message = re.sub(r"Stages\(['\"]?([\w:.]+)['\"]?\)", r"--stages \1", message)
    tables = (ExperimentOptions, LayoutOptions)
    flags = {one.argument: one.flag for table in tables for one in table.options() if one.argument}

    def spelled(match: re.Match[str]) -> str:
        flag, value = flags[match[1] or match[3]], (match[2] or match[4]).strip("'")
        return flag if value == "True" else f"{flag} {value}"

    option = rf"({'|'.join(flags)})=('\w*'|\.\.\.|\w+(?:\.\w+)*)"
    return re.sub(rf"\b(?:Experiment|Faults|Trainer)\({option}\)|\b{option}", spelled, message)
