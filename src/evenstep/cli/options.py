"""The options that say what is trained, shared by `evenstep train` and `evenstep verify`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from evenstep.experiment import BatchNorm, MemoryFormat, Precision

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """What a run trains and for how long: everything but its devices and where it saves.

    Attributes:
        given: the names of the options that stood on the command line; the others have their
            default values.
    """

    model: str
    data: str
    data_dir: str | None
    shards: int
    batch_size: int
    drop_last: bool
    lr: float
    momentum: float
    precision: Precision
    memory_format: MemoryFormat
    threads: int
    hybridize: bool
    batch_norm: BatchNorm
    epochs: int | None
    steps: int | None
    seed: int
    given: frozenset[str] = frozenset()

    def target_steps(self, epoch_steps: int, *, default: int) -> int:
        """Return the step at which the run is done: that of --steps or --epochs, the earlier one.

        Args:
            epoch_steps: steps of an epoch.
            default: the answer when neither was chosen.
        """
        limits = [self.steps, self.epochs and self.epochs * epoch_steps]
        return min((limit for limit in limits if limit is not None), default=default)


def _finite(context: click.Context, parameter: click.Parameter, value: float) -> float:
    """Refuse NaN and infinity, which `FloatRange` lets through."""
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.", context, parameter)
    return value


_AT_LEAST_1 = click.IntRange(min=1)

_OPTIONS: tuple[Callable[[Command], Command], ...] = (
    click.option(
        "--model",
        default="lenet",
        show_default=True,
        help="lenet, resnet18, mlp, or package.module:factory: a function of no arguments that "
        "returns a torch.nn.Module (the current folder is searched too).",
    ),
    click.option(
        "--data",
        type=click.Choice(["digits", "fashion-mnist"]),
        default="digits",
        show_default=True,
        help="digits come with scikit-learn, fashion-mnist is downloaded once.",
    ),
    click.option(
        "--data-dir",
        metavar="DIR",
        help="The folder with the four files of fashion-mnist; nothing is downloaded.",
    ),
    click.option(
        "--shards",
        type=_AT_LEAST_1,
        default=8,
        show_default=True,
        help="How many shards every minibatch is cut into; part of the experiment.",
    ),
    click.option(
        "--batch-size",
        type=_AT_LEAST_1,
        default=256,
        show_default=True,
        help="Examples of a minibatch, over all devices.",
    ),
    click.option(
        "--drop-last",
        is_flag=True,
        help="Leave out the short last batch of an epoch.",
    ),
    click.option(
        "--lr",
        type=click.FloatRange(min=0),
        callback=_finite,
        default=0.1,
        show_default=True,
        help="Learning rate of SGD.",
    ),
    click.option(
        "--momentum",
        type=click.FloatRange(min=0),
        callback=_finite,
        default=0.0,
        show_default=True,
        help="Momentum of SGD.",
    ),
    click.option(
        "--precision",
        type=click.Choice(["fp32", "bf16"]),
        default="fp32",
        show_default=True,
        help="bf16 computes under autocast; part of the experiment.",
    ),
    click.option(
        "--memory-format",
        type=click.Choice(["auto", "contiguous", "channels_last"]),
        default="auto",
        show_default=True,
        help="Layout of images; auto goes by the model and the kind of device.",
    ),
    click.option(
        "--threads",
        type=_AT_LEAST_1,
        default=1,
        show_default=True,
        help="Threads of each CPU device; part of the experiment.",
    ),
    click.option(
        "--hybridize",
        is_flag=True,
        help="Compile a shard's forward and backward pass, on CPUs; part of the experiment.",
    ),
    click.option(
        "--batch-norm",
        type=click.Choice(["shard", "sync"]),
        default="shard",
        show_default=True,
        help="BatchNorm layers go by each shard's statistics, or by the whole batch's; part of "
        "the experiment.",
    ),
    click.option("--epochs", type=_AT_LEAST_1, help="Stop after N epochs."),
    click.option(
        "--steps",
        type=_AT_LEAST_1,
        help="Stop after N steps, counted from the start of the training. With --epochs too, "
        "whichever comes first counts.",
    ),
    click.option(
        "--seed",
        type=click.IntRange(min=0, max=2**63 - 1),
        default=0,
        show_default=True,
        help="Of the weights, the order of the data and the random ops in the model.",
    ),
)


def takes_choices(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command` the options of `Choices`, and them as its argument `choices`."""

    @click.pass_context
    @functools.wraps(command)
    def with_choices(context: click.Context, /, **values: Any) -> Any:
        names = {field.name for field in dataclasses.fields(Choices)} - {"given"}
        given = {
            name for name in values if context.get_parameter_source(name) != ParameterSource.DEFAULT
        }
        choices = Choices(**{name: values.pop(name) for name in names}, given=frozenset(given))
        return command(choices=choices, **values)

    decorated: Callable[..., Any] = with_choices
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated
