"""Recovery from a failed attempt at a step: what can be learned from it, and whether to retry."""

from __future__ import annotations

import logging

from evenstep.distributed.step_report import AgainError
from evenstep.engine.task import is_device_failure
from evenstep.errors import BatchError, InputError, text_of
from evenstep.shard.partial_sum import AccumulatedTwiceError
from evenstep.steps.executors import IndependentExecutor
from evenstep.steps.step import Step

logger = logging.getLogger("evenstep")


class Recovery:
    """Decides whether a failed step is attempted again.

    Another attempt helps after two failures: a gradient that a backward pass added to twice, and a
    device that failed or hung; in this process or in another one.

    Args:
        executor: computes the shards; `can_retry` changes its settings before another attempt.
    """

    def __init__(self, executor: IndependentExecutor) -> None:
        self._executor = executor
        self._lost: frozenset[int] = frozenset()

    def can_retry(self, step: Step, error: BaseException) -> bool:
        """Return whether another attempt can succeed, after preparing the executor for it."""
        if isinstance(error, AccumulatedTwiceError):
            self._executor.adds_once = False
            return True
        if type(error) in (BatchError, InputError):  # a batch or a model was written to
            return False
        if isinstance(error, AgainError):
            return True
        return not step.attempt.committed and self._can_do_without(step, error)

    def give_up(self, lane: int) -> None:
        """Give a device up, unless that was done before."""
        if lane not in self._executor.engine.lost_lanes:
            self._executor.engine.lose(lane)

    def give_up_failed(self, step: Step) -> None:
        """Give up the devices that made an attempt fail, if it was a device that failed."""
        for lane, error in step.attempt.errors.items():
            if is_device_failure(error):
                self.give_up(lane)

    def _can_do_without(self, step: Step, error: BaseException) -> bool:
        """Return whether devices were lost in this step that training can do without."""
        self.give_up_failed(step)
        engine = self._executor.engine
        lost = engine.lost_lanes
        newly_lost = lost - self._lost - engine.given_up
        if not newly_lost or not self._executor.replicas.drop_lanes(lost):
            return False
        self._lost = lost
        why = text_of(error)
        for lane in sorted(newly_lost):
            logger.warning(
                f"{engine.devices[lane]} was lost in step {step.number} ({why}): the other devices "
                f"go on without it, with the same result"
            )
        return True
