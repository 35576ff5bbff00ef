"""Measures what channels-last images would bring, for the trace of a training."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

from torch import nn

from evenstep.batch import Batch
from evenstep.cli.options.training import ExperimentOptions
from evenstep.cli.training.setup import Factory, make_trainer
from evenstep.limits import MemoryFormat

_MEASURED_S = 2.0  # for both formats together, about
_FEWEST, _MOST = 3, 50  # measurements of each format


def time_image_formats(
    options: ExperimentOptions, factory: Factory, batch: Batch, device: str
) -> dict[MemoryFormat, float] | None:
    """Return the milliseconds of a step over one shard, by the order of its images in memory.

    Each is the median of steps that take turns, eagerly on one device, of new trainers.

    Args:
        options: the experiment of the training.
        factory: builds its model.
        batch: a batch of the training; its first shard is taken.
        device: where the shard is computed.

    Returns:
        None where the format doesn't matter (no images, or no convolution of images), was chosen
        by the user, or can't be channels-last: evenstep refuses it (`replicas/layouts.py`), or the
        model fails, such as at `x.view(len(x), -1)` behind a convolution.
    """
    images = batch[0]
    if options.memory_format != "preserve" or images.ndim != 4 or not _has_convolutions(factory()):
        return None
    shard = tuple(part[: -(-len(images) // options.shards)] for part in batch)
    formats: tuple[MemoryFormat, ...] = ("contiguous", "channels_last")
    steps: dict[MemoryFormat, Callable[[], object]] = {}
    with ExitStack() as trainers:
        try:
            for one in formats:
                changed = dataclasses.replace(options, shards=1, compile=False, memory_format=one)
                trainer = trainers.enter_context(make_trainer(changed, factory, devices=[device]))
                steps[one] = functools.partial(trainer.step, *shard)
                steps[one]()  # the first step checks the model
        except Exception:  # of any model
            return None
        return _medians_ms(steps)


def _has_convolutions(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


def _medians_ms(run: dict[MemoryFormat, Callable[[], object]]) -> dict[MemoryFormat, float]:
    """Return the median milliseconds of each function, which take turns."""
    times: dict[MemoryFormat, list[float]] = {name: [] for name in run}
    ends_s = time.perf_counter() + _MEASURED_S
    for number in range(_MOST):
        if number >= _FEWEST and time.perf_counter() > ends_s:
            break
        for name, function in run.items():
            began_s = time.perf_counter()
            function()
            times[name].append(1e3 * (time.perf_counter() - began_s))
    return {name: statistics.median(values) for name, values in times.items()}
