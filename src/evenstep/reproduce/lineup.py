"""The measurements of the experiments that run in fresh processes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from evenstep.bench import Contender, results
from evenstep.reproduce.plan import Size
from evenstep.reproduce.splits.measured import WAYS

Jobs = Mapping[str, Mapping[str, Any]]
"""The fields of the jobs, by experiment."""

Choices: TypeAlias = Sequence[Mapping[str, Any]]
"""What is added to a job, for each of its measurements."""

_WAITING = ("waiting.add", "waiting.mm")
_EACH_OR_END: Choices = ({"waits": "each"}, {"waits": "end"})
_ONE_OR_TWO: Choices = ({"devices": 1}, {"devices": 2})
_MXNET: Mapping[str, tuple[str, Choices]] = {
    "queued": ("operations", ({},)),
    "add": ("operations", _EACH_OR_END),
    "mm": ("operations", _EACH_OR_END),
    "together": ("operations", ({"way": "apart"}, {"way": "together"})),
    "memory": ("networks", ({"bound": "asscalar"}, {"bound": "none"})),
    "calls": ("networks", ({},)),
    "lenet": ("training", _ONE_OR_TWO),
    "resnet18": ("training", _ONE_OR_TWO),
}
_PARALLEL = ("together", "copies.square", "copies.thin")


@functools.cache
def descriptions() -> Mapping[str, Mapping[str, Any]]:
    """Return the content of `experiments.json`: each experiment, in the order of the book."""
    return results.load(Path(__file__).with_name("experiments.json"))


def jobs(size: Size) -> Jobs:
    """Return the jobs as the book has them, or as large as needed to show the same effects."""
    found = (description.get("jobs", {}) for description in descriptions().values())
    return {name: job[size] for one in found for name, job in one.items()}


def measurements(jobs: Jobs) -> list[Contender]:
    """Return every measurement of the experiments with the engine.

    A key consists of the experiment and its choices, such as "waiting.add.engine.each".
    """
    found = [_measurement("queued", jobs)]
    for contender in ("engine", "bare"):
        for waits in ("each", "end"):
            found += [_measurement(one, jobs, contender=contender, waits=waits) for one in _WAITING]
        for way in ("apart", "together"):
            found += [_measurement(one, jobs, contender=contender, way=way) for one in _PARALLEL]
    for maker in ("front", "tasks"):
        bounds = ("waits", "none", "two")
        found += [_measurement("memory", jobs, maker=maker, bound=one) for one in bounds]
    return found


def mxnet_measurements(jobs: Jobs) -> list[Contender]:
    """Return every measurement of the seeds' programs on `evenstep.mxnet`.

    A key consists of the experiment and its choice, such as "mxnet.lenet.2".
    """
    return [
        Contender(
            key=(key := ".".join([f"mxnet.{one}", *map(str, choice.values())])),
            module=f"evenstep.reproduce.mxnet.{module}",
            job={**jobs[f"mxnet.{one}"], "measure": one, **choice},
            names={"key": key},
        )
        for one, (module, choices) in _MXNET.items()
        for choice in choices
    ]


def split_measurements(jobs: Jobs) -> list[Contender]:
    """Return every measurement of the ways to split a network, such as "splits.slices.2"."""
    return [
        Contender(
            key=(key := f"splits.{way}.{devices}"),
            module="evenstep.reproduce.splits.measured",
            job={**jobs["splits"], "way": way, "devices": devices},
            names={"key": key},
        )
        for way in WAYS
        for devices in (1, 2, 3)
    ]


def _measurement(experiment: str, jobs: Jobs, **choices: str) -> Contender:
    key = ".".join([experiment, *choices.values()])
    return Contender(
        key=key,
        module=f"evenstep.reproduce.engine.{experiment.split('.')[0]}",
        job={**jobs[experiment], **choices},
        names={"key": key},
    )
