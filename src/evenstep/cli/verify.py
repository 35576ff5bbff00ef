"""`evenstep verify`: trains the same steps on several sets of devices and compares every bit."""

from __future__ import annotations

import textwrap

import click

from evenstep.cli.options.training import ExperimentOptions
from evenstep.cli.terminal.loading import loading
from evenstep.cli.training.notes import notes_on_stderr
from evenstep.cli.training.setup import load_data, make_loader, make_trainer, train_batches
from evenstep.devices import Devices, find_devices, intra_op_threads
from evenstep.errors import InputError, counted
from evenstep.models.registry import blamed_on_model, find_factory
from evenstep.verification import LayoutResult, Verdict
from evenstep.verification import verify as compare

_DEFAULT_STEPS = 20
_WIDTH = 64  # of what stands behind a name
_HINT = (
    "usual causes:",
    "  `random`, numpy.random or the clock in forward: draw with torch, whose",
    "  random operations evenstep seeds for each shard",
    "  Python state that forward changes, such as a counter or a list: each",
    "  device has its own",
)


def verify(experiment: ExperimentOptions, wanted: str) -> bool:
    """Compare results on the sets of devices in `wanted`; return whether they are identical."""
    labels = [label.strip() for label in wanted.split(",")]
    layouts = [_layout(label, experiment.threads) for label in labels]
    if len(layouts) < 2:
        raise InputError(f"got --devices {wanted}: give at least two to compare, such as 1,2")
    factory = find_factory(experiment.model)
    with loading(experiment.data):
        examples = load_data(experiment.data, experiment.data_dir, train=True)
    loader = make_loader(experiment, examples, experiment.seed)
    steps = experiment.target_steps(len(loader), default=_DEFAULT_STEPS)
    width = max(map(len, ("devices", *labels)))
    click.echo(f"{'devices':<{width}}  fingerprint after {counted(steps, 'step')}")
    waiting = iter(labels)

    def print_run(run: LayoutResult) -> None:
        click.echo(f"{next(waiting):<{width}}  {run.fingerprints[-1]}")

    blamed = blamed_on_model(experiment.model, lambda: "in training")
    with notes_on_stderr(), intra_op_threads(1), blamed:
        verdict = compare(
            lambda devices: make_trainer(experiment, factory, devices=devices),
            lambda trainer: train_batches(trainer, loader),
            layouts,
            steps,
            on_result=print_run,
        )
    for line in _spell(verdict, labels, steps):
        click.echo(line)
    return verdict.identical


def _layout(label: str, threads: int) -> Devices:
    """Parse an entry of --devices, and check that its devices exist."""
    devices: Devices = label if label.lstrip("-").isdecimal() else label.split("+")
    if not label or label == "auto":
        raise InputError(
            f"got {label!r} in --devices: give numbers such as 1,2,3, or sets of names such as "
            f"cpu:0,cpu:0+cpu:1"
        )
    return find_devices(devices, threads=threads)


def _spell(verdict: Verdict, labels: list[str], steps: int) -> list[str]:
    found = verdict.difference
    if found is None:
        sets = f"{', '.join(labels[:-1])} and {labels[-1]}"
        noun = " devices" if all(label.isdecimal() for label in labels) else ""
        return [f"identical: the same bits after each of {counted(steps, 'step')} on {sets}{noun}"]
    ours, theirs = (labels[number] for number in found.layouts)
    lines = [
        f"not identical: {ours} and {theirs} differ",
        f"  first step    {found.step} (counted from 0)",
    ]
    if found.tensor is None:
        lines += [
            "  first shard   unknown: when that step was replayed, the two did not differ again",
            "                (the model depends on something outside evenstep, such as the clock)",
        ]
    elif found.shard is None:
        lines += [
            "  first shard   none: the gradients and buffers of every shard agree",
            f"  first tensor  {found.tensor}, after the step",
        ]
    else:
        lines += [
            f"  first shard   {found.shard} (counted from 0)",
            f"  first tensor  {found.tensor}",
        ]
    if found.seen:
        first, *others = textwrap.wrap(found.seen, _WIDTH)
        lines += [f"  seen there    {first}", *(f"{'':16}{line}" for line in others)]
    if not found.repeats:
        lines.append("  repeatable    no: a replay on the same devices gave a different result")
    return [*lines, *_HINT]
