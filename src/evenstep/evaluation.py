"""Metrics over a data set as exact totals and counts, shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TypeAlias

import torch
from torch import nn

from evenstep.compute import ShardWork, autocast
from evenstep.objective import Number, split_batch
from evenstep.replicas import Replica
from evenstep.rng import ShardRandomness
from evenstep.sharding import Batch

Metric: TypeAlias = Callable[..., "tuple[Number, Number]"]
"""`metric(output, *targets) -> (total, count)`; with an objective, `metric(model, *batch)`."""

Pairs: TypeAlias = dict[str, tuple[Number, Number]]
Measure: TypeAlias = Callable[[nn.Module, Batch, Mapping[str, Metric]], Pairs]


def measure_output(model: nn.Module, batch: Batch, metrics: Mapping[str, Metric]) -> Pairs:
    """Give every metric the output of one forward pass, and the targets."""
    source, targets = split_batch(batch)
    output = model(source)
    return {name: metric(output, *targets) for name, metric in metrics.items()}


def measure_model(model: nn.Module, batch: Batch, metrics: Mapping[str, Metric]) -> Pairs:
    """Give every metric the model and the batch, as an objective gets them."""
    return {name: metric(model, *batch) for name, metric in metrics.items()}


def measure_shard(
    replica: Replica, work: ShardWork, measure: Measure, metrics: Mapping[str, Metric]
) -> Pairs:
    """Return each metric's (total, count) of one shard; nothing of the model is changed."""
    replica.open_shard()
    randomness = nullcontext() if work.random_seed is None else ShardRandomness(work.random_seed)
    with torch.no_grad(), randomness, autocast(replica.device.kind, work.precision):
        pairs = measure(replica.module, work.batch, metrics)
    replica.changed_buffers()
    return pairs


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put `model` into evaluation mode, and each of its modules back into its own afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
