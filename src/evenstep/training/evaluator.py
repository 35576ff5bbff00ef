"""Metrics and predictions over many batches, computed on every device like training steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from evenstep.batch import Batch
from evenstep.batch.cut import Cut
from evenstep.batch.nesting import nest
from evenstep.batch.rng import derive_seed
from evenstep.data.loader import Loader
from evenstep.data.order import Cursor
from evenstep.engine.interrupts import interruptible
from evenstep.errors import BatchError, ModelError, add_note
from evenstep.shard.evaluation import (
    Forward,
    Measure,
    evaluation_mode,
    join_outputs,
)
from evenstep.steps.executor import IndependentExecutor
from evenstep.steps.step import Position, SeedOf
from evenstep.steps.update import sum_floats
from evenstep.training.metric_objects import split_metrics

_TENSOR = {torch.Tensor}

Open: TypeAlias = Callable[[], None]
"""Waits for the steps in flight, and brings the replicas up to date with the user's module."""


class Evaluator:
    """Evaluates and predicts with a trainer's model.

    Args:
        model: the user's module.
        executor: computes the shards of a batch.
        measure: gives the metrics what they are computed from.
    """

    def __init__(self, model: nn.Module, executor: IndependentExecutor, measure: Measure) -> None:
        self._model = model
        self._executor = executor
        self._measure = measure

    def evaluate(
        self,
        batches: Iterable[Batch],
        metrics: Mapping[str, Any],
        *,
        position: Position,
        open_batch: Open,
        other: nn.Module | None,
    ) -> dict[str, Any]:
        """Return each metric over all `batches` (see `Trainer.evaluate`)."""
        functions, objects = split_metrics(metrics, self._measure)
        sums, counted = dict.fromkeys(functions, (0.0, 0.0)), False
        open_batch()
        with evaluation_mode(self._model), values_of(other, self._model), _explained(batches):
            for cut, seed in self._cuts(batches, position, open_batch, "evaluate"):
                both: dict[str, Any] = {**functions, **objects}
                shards = self._executor.measure(cut, self._measure, both, seed, [*objects])
                counted = True
                for name, (total, count) in sums.items():
                    more_total = sum_floats([shard[name][0] for shard in shards])
                    more_count = sum_floats([shard[name][1] for shard in shards])
                    sums[name] = (total + more_total, count + more_count)
                for name, one in objects.items():
                    one.add([shard[name] for shard in shards])
        if not counted or any(count == 0 for _, count in sums.values()):
            raise BatchError("evaluate counted no examples: give at least one batch")
        means = {name: total / count for name, (total, count) in sums.items()}
        return {name: means[name] if name in means else objects[name].compute() for name in metrics}

    def predict(
        self,
        batches: Iterable[Batch],
        forward: Forward,
        dim: int | None,
        *,
        position: Position,
        open_batch: Open,
        other: nn.Module | None,
    ) -> Batch:
        """Return the outputs for all `batches` (see `Trainer.predict`)."""
        if isinstance(batches, Loader):
            batches = batches.in_order()
        outputs: list[Batch] = []
        examples: list[int] = []
        batch_dim = self._executor.experiment.batch_dim
        dims = [*dict.fromkeys((batch_dim, 0))] if dim is None else [dim]
        open_batch()
        with evaluation_mode(self._model), values_of(other, self._model), _explained(batches):
            for cut, seed in self._cuts(batches, position, open_batch, "predict"):
                outputs += self._executor.predict(cut, forward, seed)
                examples += [hi - lo for lo, hi in cut.bounds[: cut.filled]]
        if not outputs:
            raise BatchError("predict got no examples: give at least one batch")
        return join_outputs(outputs, examples, dims)

    def _cuts(
        self, batches: Iterable[Batch], position: Position, open_batch: Open, call: str
    ) -> Iterator[tuple[Cut, SeedOf]]:
        """Yield each batch, cut into shards, and what returns the seeds of its shards."""
        executor, experiment = self._executor, self._executor.experiment
        if isinstance(batches, Loader):
            batches = executor.group.batches(batches, Cursor(), lambda: position.steps_done, call)
        for number, batch in enumerate(_each(batches)):
            whole = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
            arguments = nest(whole, experiment.batch_dim)
            interruptible(executor.group.refuse_other_batches, arguments, call, number)
            cut = executor.group.cut(arguments, experiment.shards, position.steps_done)
            open_batch()
            yield cut, functools.partial(derive_seed, "evaluation", experiment.seed, number)


@contextlib.contextmanager
def values_of(other: nn.Module | None, model: nn.Module) -> Iterator[None]:
    """Inside `with`, give `model` the parameters and buffers of another module of its structure.

    Args:
        other: the module, such as an average of the model's weights; None for the model itself.
        model: the user's model; at the end it has its own values again, bit for bit.

    Raises:
        ModelError: `other` has other parameters or buffers.
    """
    if other is None:
        yield
        return
    own, theirs = _tensors_by_name(model), _tensors_by_name(other)
    for name in {**own, **theirs}:
        shapes = [
            f"shape {tuple(each[name].shape)}" if name in each else "no tensor"
            for each in (own, theirs)
        ]
        if shapes[0] != shapes[1]:
            raise ModelError(
                f"the given model has {shapes[1]} named {name}, the trainer's model {shapes[0]}: "
                f"give a module of the same structure (of an AveragedModel, its .module)"
            )
    before = {name: tensor.clone() for name, tensor in own.items()}
    try:
        _copy_all(theirs, own)
        yield
    finally:
        _copy_all(before, own)


def _tensors_by_name(module: nn.Module) -> dict[str, torch.Tensor]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}


def _copy_all(sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(sources[name])


@contextlib.contextmanager
def _explained(batches: object) -> Iterator[None]:
    """Inside `with`, note on errors that one batch was given instead of a list of batches."""
    try:
        yield
    except Exception as error:
        if isinstance(batches, torch.Tensor):
            add_note(
                error,
                "got a tensor as batches, each row of which is taken for a batch: give a list of "
                "batches, such as [X]",
            )
        elif isinstance(batches, tuple) and _TENSOR.issuperset(map(type, batches)):
            add_note(
                error,
                f"got a tuple of {len(batches)} tensors as batches, each of which is taken for a "
                f"batch: give a list of batches, such as [(X, y)]",
            )
        raise


def _each(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield each batch; Ctrl-C may interrupt the user's code that makes it."""
    iterator, end = interruptible(iter, batches), object()
    while (batch := interruptible(next, iterator, end)) is not end:
        yield batch
