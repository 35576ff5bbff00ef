"""Metrics and predictions over many batches, computed on every device like training steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from evenstep.batch import Batch
from evenstep.batch.cut import Cut
from evenstep.batch.nesting import Nesting
from evenstep.batch.seeds import derive_seed
from evenstep.data.adapters.sources import Sources
from evenstep.data.loader import Loader
from evenstep.data.order import Cursor
from evenstep.engine import streams
from evenstep.engine.interrupts import INTERRUPTS, interruptible
from evenstep.errors import BatchError, InputError, shown
from evenstep.shard.evaluation import (
    COLLECTED,
    Forward,
    Measure,
    evaluation_mode,
    join_outputs,
)
from evenstep.steps.executors import IndependentExecutor
from evenstep.steps.step import Progress, SeedOf
from evenstep.steps.update import sum_floats
from evenstep.training.evaluation.metric_objects import (
    MetricObjects,
    collect,
    split_metrics,
)
from evenstep.training.evaluation.other_model import OtherValues

_TENSOR = {torch.Tensor}


class Evaluator:
    """Evaluates and predicts with a trainer's model.

    Args:
        model: the user's module.
        executor: computes the shards of a batch.
        measure: gives the metrics what they are computed from.
        progress: says how many steps were done.
        values: of other models, evaluated in the place of this one.
        open_flight: waits for the steps in flight, and brings the replicas up to date with `model`,
            also after writes that only `may_be_written=True` reckons with.
    """

    def __init__(
        self,
        model: nn.Module,
        executor: IndependentExecutor,
        measure: Measure,
        progress: Progress,
        values: OtherValues,
        open_flight: Callable[..., None],
    ) -> None:
        self._model = model
        self._executor = executor
        self._measure = measure
        self._progress = progress
        self._values = values
        self._open_flight = open_flight
        self._nesting = Nesting(executor.experiment.batch_dim)

    def evaluate(
        self,
        batches: Iterable[Batch],
        metrics: Mapping[str, Any],
        *,
        other: nn.Module | None,
    ) -> dict[str, Any]:
        """Return each metric over all `batches` (see `Trainer.evaluate`)."""
        functions, given = split_metrics(metrics, self._measure)
        experiment = self._executor.experiment
        threads, no_shard = self._executor.engine.devices[0].threads, experiment.shards
        objects = MetricObjects(given, threads, experiment.batch_dim)
        of_shards: dict[str, Any] = {**functions, COLLECTED: collect} if given else functions
        sums, counted = dict.fromkeys(functions, (0.0, 0.0)), False
        with self._evaluating(batches, other):
            for cut, seed in self._cuts(batches, "evaluate"):
                shards = self._executor.measure(cut, self._measure, of_shards, seed, COLLECTED)
                counted = True
                for name, (total, count) in sums.items():
                    more_total = sum_floats([shard[name][0] for shard in shards])
                    more_count = sum_floats([shard[name][1] for shard in shards])
                    sums[name] = (total + more_total, count + more_count)
                if given:
                    objects.update([one[COLLECTED] for one in shards], cut, seed(no_shard))
        if not counted or any(count == 0 for _, count in sums.values()):
            raise BatchError("evaluate counted no examples: give at least one batch")
        means = {name: total / count for name, (total, count) in sums.items()}
        found = means | objects.compute(derive_seed("metrics", experiment.seed))
        return {name: found[name] for name in metrics}

    def predict(
        self,
        batches: Iterable[Batch],
        forward: Forward,
        dim: int | None,
        *,
        other: nn.Module | None,
    ) -> Batch:
        """Return the outputs for all `batches` (see `Trainer.predict`)."""
        if isinstance(batches, Loader):
            batches = batches.in_order()
        outputs: list[Batch] = []
        examples: list[int] = []
        batch_dim = self._executor.experiment.batch_dim
        dims = [*dict.fromkeys((batch_dim, 0))] if dim is None else [dim]
        with self._evaluating(batches, other):
            for cut, seed in self._cuts(batches, "predict"):
                outputs += self._executor.predict(cut, forward, seed)
                examples += [hi - lo for lo, hi in cut.bounds[: cut.filled]]
        if not outputs:
            raise BatchError("predict got no examples: give at least one batch")
        return join_outputs(outputs, examples, dims)

    @contextlib.contextmanager
    def _evaluating(self, batches: Iterable[Batch], other: nn.Module | None) -> Iterator[None]:
        """Inside `with`, the model is in evaluation mode, maybe with a different one's values."""
        _refuse_one_batch(batches)
        self._open_flight(may_be_written=True)
        with evaluation_mode(self._model), self._values.of(other):
            yield

    def _cuts(self, batches: Iterable[Batch], call: str) -> Iterator[tuple[Cut, SeedOf]]:
        """Yield each batch, cut into shards, and what returns the seeds of its shards."""
        executor, experiment = self._executor, self._executor.experiment
        steps_done, before = self._progress.position.steps_done, executor.group.in_hand
        if isinstance(batches, Loader):
            source = Sources(experiment.seed, locked=False, are_kept=False).of(batches)
            batches = executor.group.batches(source, Cursor(), lambda: steps_done, call)
        for number, batch in enumerate(_each(batches)):
            whole = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
            arguments = self._nesting(whole)
            given = arguments, experiment.shards, steps_done, (call, number), before
            cut = interruptible(executor.group.cut_compared, *given)
            streams.finish_elsewhere(cut.held(), executor.engine.devices)
            self._open_flight()
            yield cut, functools.partial(derive_seed, "evaluation", experiment.seed, number)


def _refuse_one_batch(batches: object) -> None:
    """Refuse one batch that was given instead of a list of batches."""
    if isinstance(batches, torch.Tensor):
        raise InputError(
            "got a tensor as batches, so each of its rows would be a batch: give a list of "
            "batches, such as [X]"
        )
    if not isinstance(batches, tuple) or not _TENSOR.issuperset(map(type, batches)):
        return
    if len({(one.dtype, one.shape[1:]) for one in batches}) > 1:  # else X.split(256), perhaps
        raise InputError(
            f"got a tuple of {len(batches)} tensors as batches, so each of them would be a batch: "
            f"give a list of batches, such as [(X, y)]"
        )


def _each(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield each batch; Ctrl-C may interrupt the user's code that makes it."""
    if not hasattr(type(batches), "__iter__") and not hasattr(type(batches), "__getitem__"):
        raise InputError(
            f"got {shown(batches)} as batches: give an iterable of batches, such as a DataLoader "
            f"or a list, [(X, y)]"
        )
    iterator, end = interruptible(iter, batches), object()
    INTERRUPTS.check()
    while (batch := interruptible(next, iterator, end)) is not end:
        yield batch
        INTERRUPTS.check()  # waits for short batches don't
