"""Recovery from a failed attempt at a step: what can be learned from it, and whether to retry."""

from __future__ import annotations

from evenstep.distributed.step_report import AgainError
from evenstep.errors import BatchError, InputError
from evenstep.shard.partial_sum import AccumulatedTwiceError
from evenstep.steps.executors import IndependentExecutor
from evenstep.steps.step import Step


class Recovery:
    """Decides whether a failed step is attempted again.

    Another attempt helps after two failures: a gradient that a backward pass added to twice, and a
    device that failed or hung; in this process or in another one.

    Args:
        executor: computes the shards; `can_retry` changes its settings before another attempt.
    """

    def __init__(self, executor: IndependentExecutor) -> None:
        self._executor = executor

    def can_retry(self, step: Step, error: BaseException) -> bool:
        """Return whether another attempt can succeed, after preparing the executor for it."""
        if isinstance(error, AccumulatedTwiceError):
            self._executor.adds_once = False
            return True
        if type(error) in (BatchError, InputError):  # a batch or a model was written to
            return False
        if isinstance(error, AgainError):
            return True
        if step.attempt.committed:
            return False
        losses = self._executor.losses
        losses.give_up_failed(step.attempt.errors)
        return losses.can_go_on(error, f"step {step.number}")
