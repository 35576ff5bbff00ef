"""`evenstep verify`: the same steps on several numbers of devices, compared bit for bit."""

from __future__ import annotations

import functools

import click

from evenstep.cli.notes import notes_on_stderr
from evenstep.cli.options import Choices, takes_choices
from evenstep.cli.setup import load_data, make_loader, make_trainer, train_batches
from evenstep.devices import Devices, find_devices, intra_op_threads
from evenstep.errors import InputError
from evenstep.models.registry import blamed_on_model, find_factory
from evenstep.verification import Difference, LayoutResult, Verdict
from evenstep.verification import verify as compare

_DEFAULT_STEPS = 20
_HINT = (
    "usual causes:",
    "  `random`, numpy.random or the clock in forward: draw with torch, whose random ops",
    "  evenstep seeds for each shard",
    "  Python state that forward changes, such as a counter or a list: each device has its own",
)


@click.command()
@takes_choices
@click.option(
    "--devices",
    "wanted",
    default="1,2,3",
    show_default=True,
    metavar="N,N,...",
    help="Numbers of devices to compare; names joined by + stand for one set: 1,cpu:0+cpu:1:own.",
)
@click.pass_context
def verify(context: click.Context, choices: Choices, wanted: str) -> None:
    """Compare results on several numbers of devices, bit for bit.

    The same steps are trained on each of them; without --epochs and --steps these are 20. The exit
    code is 0 only if all are equal. Where they differ, the first step, shard and tensor that differ
    are found by replaying.
    """
    labels = [label.strip() for label in wanted.split(",")]
    layouts = [_layout(label, choices.threads) for label in labels]
    if len(layouts) < 2:
        raise InputError(f"got --devices {wanted}: give at least two to compare, such as 1,2")
    factory = find_factory(choices.model)
    loader = make_loader(
        choices, load_data(choices.data, choices.data_dir, train=True), choices.seed
    )
    steps = choices.target_steps(len(loader), default=_DEFAULT_STEPS)
    width = max(map(len, ("devices", *labels)))
    click.echo(f"{'devices':<{width}}  fingerprint after {_count(steps, 'step')}")
    waiting = iter(labels)

    def print_run(run: LayoutResult) -> None:
        click.echo(f"{next(waiting):<{width}}  {run.fingerprints[-1]}")

    blamed = blamed_on_model(choices.model, lambda: "in training")
    with notes_on_stderr(), intra_op_threads(1), blamed:
        verdict = compare(
            functools.partial(make_trainer, choices, factory=factory),
            lambda trainer: train_batches(trainer, loader),
            layouts,
            steps,
            on_result=print_run,
        )
    for line in _spell(verdict, labels, steps):
        click.echo(line)
    context.exit(0 if verdict.identical else 1)


def _layout(label: str, threads: int) -> Devices:
    """Read one entry of --devices, and make sure that its devices are there."""
    devices: Devices = label if label.isdecimal() else label.split("+")
    if not label or label == "auto":
        raise InputError(
            f"got {label!r} in --devices: give numbers such as 1,2,3, or sets of names such as "
            f"cpu:0,cpu:0+cpu:1"
        )
    return find_devices(devices, threads=threads)


def _spell(verdict: Verdict, labels: list[str], steps: int) -> list[str]:
    if verdict.difference is None:
        sets = f"{', '.join(labels[:-1])} and {labels[-1]}"
        noun = " devices" if all(label.isdecimal() for label in labels) else ""
        return [f"identical: the same bits after each of {_count(steps, 'step')} on {sets}{noun}"]
    return _spell_difference(verdict.difference, labels)


def _spell_difference(found: Difference, labels: list[str]) -> list[str]:
    ours, theirs = (labels[number] for number in found.layouts)
    lines = [
        f"not identical: {ours} and {theirs} differ",
        f"  first step    {found.step} (counted from 0)",
    ]
    if found.tensor is None:
        lines += [
            "  first shard   unknown: when that step was replayed, the two did not differ again",
            "                (the model reaches for something outside evenstep, such as the clock)",
        ]
    elif found.shard is None:
        lines += [
            "  first shard   none: every shard's own gradients and buffers agree",
            f"  first tensor  {found.tensor}, after the step",
        ]
    else:
        lines += [
            f"  first shard   {found.shard} (counted from 0)",
            f"  first tensor  {found.tensor}",
        ]
    if not found.repeats:
        lines.append("  repeatable    no: replayed on the same devices, the result was another one")
    return [*lines, *_HINT]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")
