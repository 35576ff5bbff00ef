"""Recovery from a failed attempt at a step: what can be learned from it, and whether to retry."""

from __future__ import annotations

import logging

from evenstep.distributed.step_report import AgainError
from evenstep.engine.task import is_device_failure
from evenstep.errors import BatchError, EvenstepError, InputError, text_of
from evenstep.shard.partial_sum import AccumulatedTwiceError
from evenstep.steps.executor import IndependentExecutor
from evenstep.steps.step import Step

logger = logging.getLogger("evenstep")


class DrawsSeenError(EvenstepError):
    """A step drew from a default generator, and must be computed again with shards' own."""


class Recovery:
    """Decides whether a failed step is attempted again.

    Another attempt helps after three failures: random ops seen for the first time, a gradient that
    a backward pass added to twice, and a device that failed or hung.

    Args:
        executor: computes the shards; `can_retry` changes its settings before another attempt.
        restores_generators: whether the default generators may be put back: not where the user's
            thread goes on while a step is in flight.
    """

    def __init__(self, executor: IndependentExecutor, *, restores_generators: bool) -> None:
        self._executor = executor
        self._restores_generators = restores_generators
        self._lost: frozenset[int] = frozenset()

    def can_retry(self, step: Step, error: BaseException) -> bool:
        """Return whether another attempt can succeed, after preparing the executor for it."""
        executor, before = self._executor, step.attempt.before
        watch = executor.watch
        if isinstance(error, AccumulatedTwiceError):
            executor.adds_once = False
            return True
        if type(error) in (BatchError, InputError):  # a batch or a model was written to
            return False
        is_open = not step.attempt.committed
        drew = is_open and isinstance(error, Exception) and watch.drew(before)
        if isinstance(error, AgainError) or drew:
            restore = self._restores_generators or watch.is_first_step
            watch.note_draws(before, restore=restore)
            return True
        return is_open and self._can_do_without(step, error)

    def undo_draws(self, step: Step) -> None:
        """Put the default generators back to where a step began that is not taken."""
        watch = self._executor.watch
        if self._restores_generators or watch.is_first_step:
            watch.put_back(step.attempt.before)

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
