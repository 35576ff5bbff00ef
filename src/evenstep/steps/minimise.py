"""Steps with an optimizer that evaluates the batch as often as it likes, such as LBFGS."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Sequence

import torch

from evenstep.checkpoint.restore import rolled_back_on_error
from evenstep.devices import intra_op_threads
from evenstep.engine.interrupts import INTERRUPTS
from evenstep.errors import InputError
from evenstep.shard.forward_backward import Leaf
from evenstep.shard.partial_sum import PartialSum
from evenstep.steps.executors import IndependentExecutor
from evenstep.steps.failures import refuse_no_gradient
from evenstep.steps.pipeline import Pipeline
from evenstep.steps.step import Progress, Step, StepLoss
from evenstep.steps.update import Update, settle

_BY_PLACE = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


def minimises(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer needs a closure that evaluates the batch.

    That is LBFGS, and any other whose `step(closure)` has no default for it.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return True
    try:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
    except (TypeError, ValueError):  # not a function of Python
        return False
    return closure is not None and closure.default is closure.empty and closure.kind in _BY_PLACE


class Minimiser:
    """Takes steps with such an optimizer, one at a time.

    The optimizer's own arithmetic runs in the calling thread, with the devices' number of threads.

    Args:
        optimizer: the user's optimizer.
        executor: computes the shards of a batch.
        update: puts gradients where the optimizer reads them.
        pipeline: takes each evaluation as a step.
        progress: counts the step when its update is made.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        executor: IndependentExecutor,
        update: Update,
        pipeline: Pipeline,
        progress: Progress,
    ) -> None:
        self._optimizer = optimizer
        self._executor = executor
        self._update = update
        self._pipeline = pipeline
        self._progress = progress

    def take(self, step: Step) -> StepLoss:
        """Take a step; return a handle of its mean loss, which is there."""
        if step.own:
            raise InputError(
                f"the parameters have gradients of your own, but {type(self._optimizer).__name__} "
                f"computes the gradients of a batch several times in a step: call "
                f"optimizer.zero_grad() before the step, and add a penalty in objective=..."
            )
        closure = _Closure(step, self._executor, self._update, self._pipeline)
        progress, home = self._progress, self._executor.replicas.home.module
        self._pipeline.wait()
        with (
            INTERRUPTS.held(),
            rolled_back_on_error(home.parameters(), self._optimizer),
            intra_op_threads(self._executor.experiment.threads),
        ):
            self._update.minimise(closure)
        assert closure.first is not None
        assert closure.root is not None
        progress.count(step)
        step.loss, step.outputs = closure.first.loss, closure.first.outputs
        step.is_taken = step.finished = True
        close = functools.partial(self._update.close_minimised, step, closure.root)
        try:
            self._pipeline.run_in_first_lane(close)
        finally:
            step.release()
        return StepLoss(step, lambda step: None)


class _Closure:
    """What the optimizer calls to evaluate the batch of a step.

    Such an optimizer writes parameters between evaluations, and needs gradients that can be viewed
    as flat vectors.

    Attributes:
        first: the first evaluation.
        root: the sum over the shards of the last evaluation.
    """

    def __init__(
        self, step: Step, executor: IndependentExecutor, update: Update, pipeline: Pipeline
    ) -> None:
        self._step = step
        self._replicas = executor.replicas
        self._update = update
        self._pipeline = pipeline
        self.first: Step | None = None
        self.root: PartialSum | None = None

    def __call__(self) -> float:
        """Evaluate the batch once; return its mean loss."""
        attempt = self._step.attempt
        self._pipeline.follow_user()
        evaluation = dataclasses.replace(
            self._step, finish=self._install, attempt=attempt.again(), counts=False
        )
        self._pipeline.submit(evaluation).wait_to_read()
        attempt.clock.add(evaluation.attempt.clock)
        self.first = self.first or evaluation
        return evaluation.loss

    def _install(self, step: Step, leaves: Sequence[Leaf | None], root: PartialSum) -> None:
        step.loss, count = settle(step, leaves)
        refuse_no_gradient(step, root, self._replicas.home.parameters)
        root.gradients = [g if g is None else g.contiguous() for g in root.gradients]
        self._replicas.restore_opening()
        self._update.install(step, count, root)
        self.root = root
