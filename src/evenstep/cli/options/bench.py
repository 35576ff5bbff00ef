"""The options that all kinds of `evenstep bench` take."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any, Literal

import click

from evenstep.cli.options.completion import Suggested
from evenstep.cli.options.table import OptionTable, option
from evenstep.cli.options.training import Finite
from evenstep.cli.terminal.files import OutputFile
from evenstep.errors import InputError, shown
from evenstep.limits import MODELS, MOST_EXAMPLES, MOST_SECONDS, MOST_SHARDS, TEXT_NETWORKS

_NETWORKS = (*MODELS, *TEXT_NETWORKS)
_MOST_NUMBERS = 2**30

_of_work = functools.partial(option, group="What is trained")
_of_measurement = functools.partial(option, group="Measurement")
_of_output = functools.partial(option, None, group="Output")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(OptionTable):
    """What is measured, how often, and where the results are written."""

    model: str = _of_work(
        "lenet", f"{', '.join(_NETWORKS)}, or package.module:factory.", Suggested(_NETWORKS)
    )
    data: Literal["noise", "digits", "fashion-mnist"] = _of_work(
        "noise", "Data set to train on; the values do not affect the time."
    )
    data_dir: str | None = _of_work(
        None, "Folder with the files of fashion-mnist.", click.Path(), metavar="DIR"
    )
    shape: str = _of_work("1,28,28", "With noise: shape of an example.", metavar="N,N,...")
    classes: int = _of_work(10, "With noise: number of classes.", click.IntRange(1, 2**31 - 1))
    batch_size: int = _of_work(256, "Examples in a batch.", click.IntRange(1, MOST_EXAMPLES))
    shards: int = _of_work(8, "Number of shards, for evenstep.", click.IntRange(1, MOST_SHARDS))
    rounds: int = _of_measurement(5, "Measurements of each contender, each in a new process.")
    seconds: float = _of_measurement(
        3.0,
        "Approximate length of a measurement of evenstep; the others train for as many steps.",
        Finite(min=0, min_open=True, max=MOST_SECONDS),
    )
    steps: int | None = _of_measurement(None, "Number of steps, instead of --seconds.")
    quick: bool = _of_measurement(
        False, "Measure 2 rounds of about a second, unless --rounds or --seconds is given."
    )
    json_file: str | None = _of_output(
        "Write machine, versions and all measurements as JSON.", OutputFile(), flag="--json"
    )
    plot: str | None = _of_output(
        "Draw the results as .png or .svg (needs matplotlib).", OutputFile()
    )

    def shortened(self) -> Plan:
        """Return the plan with what --quick means for the rest."""
        short = {"rounds": 2, "seconds": 1.0} if self.quick else {}
        values: dict[str, Any] = {
            name: value for name, value in short.items() if name not in self.given
        }
        return dataclasses.replace(self, **values)

    @property
    def job(self) -> dict[str, Any]:
        """The settings that all contenders share, without the number of steps.

        Raises:
            InputError: a batch of noise would be too large.
        """
        shape = whole_numbers("--shape", self.shape)
        if self.data == "noise" and math.prod(shape) * self.batch_size > _MOST_NUMBERS:
            raise InputError(
                f"got --shape {shown(self.shape)} and --batch-size {self.batch_size}: a batch of "
                f"noise may have at most {_MOST_NUMBERS} numbers (4 GiB)"
            )
        return {
            "network": self.model,
            "data": self.data,
            "data_dir": self.data_dir,
            "shape": shape,
            "classes": self.classes,
            "examples": self.batch_size,
            "shards": self.shards,
        }


def whole_numbers(flag: str, text: str) -> list[int]:
    """Return the numbers of at least 1 that an option lists with commas."""
    parts = text.split(",")
    if not all(re.fullmatch(r"\s*0*[1-9]\d{0,9}\s*", part) for part in parts):
        raise InputError(
            f"got {flag} {shown(text)}: expected whole numbers with commas, such as 1,2"
        )
    return [int(part) for part in parts]
