"""The steps in flight: submitted as tasks, waited for in order, done again or abandoned.

The tasks of a step are its copies (where a step may overlap the one before), its shards, and its
end: the settling of the loss and the update. Shards read the model and the end writes it, so the
shards of the next step wait for the end, while its copies do not. A node of the canonical tree is
summed in the task of whichever shard brings its second child.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from evenstep.engine import Engine, Task
from evenstep.engine.task import PLAIN
from evenstep.errors import BatchError, ClosedError, EvenstepError, InputError, PeerError
from evenstep.shard.forward_backward import Leaf, NodeSum
from evenstep.shard.gradients import AccumulatedTwiceError
from evenstep.training.clock import Timekeeper
from evenstep.training.executor import ShardRunner
from evenstep.training.step import Attempt, StepRun
from evenstep.training.step_exchange import AgainError, Exchange, Place, Verdict, Way

logger = logging.getLogger("evenstep")
_LOOK_EVERY_S = 1.0


class Flight:
    """The steps that are not finished, oldest first.

    Args:
        engine: where their tasks run.
        runner: makes the tasks of their shards.
        timekeeper: is told of every step that ends.
        overlap: whether a step may be submitted while the one before runs.
        lost_after_s: how long a device may be at one shard while another one waits.
        abandoned: called with the first step that was not finished when steps are abandoned.
    """

    def __init__(
        self,
        engine: Engine,
        runner: ShardRunner,
        timekeeper: Timekeeper,
        *,
        overlap: bool,
        lost_after_s: float,
        abandoned: Callable[[StepRun], None],
    ) -> None:
        self._engine = engine
        self._runner = runner
        self._timekeeper = timekeeper
        self._overlap = overlap
        self._lost_after_s = lost_after_s
        self._abandoned = abandoned
        self._runs: deque[StepRun] = deque()
        self._lost: set[int] = set()
        self._model = engine.Var(None, "the model")
        kinds = {(device.kind, device.threads) for device in engine.devices}
        self._any_lane = len(kinds) == 1 and engine.devices[0].kind == "cpu"

    def __len__(self) -> int:
        return len(self._runs)

    def start(self, run: StepRun) -> None:
        """Submit the tasks of a step; return at once."""
        engine, runner, attempt = self._engine, self._runner, run.attempt
        runner.team.note(f"computing its shards of step {run.number}")
        if self._overlap and runner.replicas.have_followed:
            runner.watch.look_again()
            runner.replicas.have_followed = False
        copies = runner.copy_tasks(attempt) if self._overlap else []
        shards = runner.train_tasks(
            attempt, run.objective, run.seed_of, run.observe, copies, [self._model]
        )
        leaves = [engine.handle(task) for task in shards]
        run.end = self._task("update", self._end, run, run, leaves)
        if copies:
            engine.submit_tasks(copies)
        if self._runs:
            engine.submit_tasks([self._task("open", self._open, run, attempt)])
        else:
            self._open(attempt)
        self._runs.append(run)
        engine.submit_tasks([*shards, run.end])

    def complete(self, *, down_to: int = 0, until: StepRun | None = None) -> None:
        """Wait for the oldest steps, until `down_to` are left, or until `until` is finished.

        Raises:
            the error of a step; that step and those after it are abandoned.
        """
        while len(self._runs) > down_to and (until is None or until in self._runs):
            run = self._runs[0]
            assert run.end is not None
            try:
                self._wait_for(run.end)
            except BaseException as interrupt:  # Ctrl-C
                self.abandon(interrupt)
                raise
            failure = self._failure_of(run.end)
            if failure is None:
                self._runs.popleft().let_go()
                self._runner.watch.step_done()
            elif self._can_mend(run, failure):
                with contextlib.suppress(AgainError):
                    self._tell(run.attempt, run.place, Verdict.AGAIN)
                self._drop_all()
                self._drop_gradients(run.attempt)
                self._start_again()
            else:
                self.abandon(failure)
                raise failure

    def abandon(self, error: BaseException) -> None:
        """Drop what has not begun, wait for what runs, and leave the model as it was found."""
        self._drop_all()
        while self._runs and self._runs[0].finished:
            self._runs.popleft().let_go()
        if not self._runs:
            return
        first, place = self._runs[0], self._runs[0].place
        for run in self._runs:
            run.error = error
            run.let_go()
        self._forget_runs()
        self._abandoned(first)
        with contextlib.suppress(PeerError, AgainError):  # this error came first
            self._tell(first.attempt, place, Verdict.FAILED, _spelled(error))
            self._drop_gradients(first.attempt)

    def leave(self, error: BaseException) -> None:
        """Let the other processes know why this one takes no further step."""
        if self._runner.team.exchange is not None:
            self._runner.team.exchange.leave(_spelled(error))

    # ---- in the lanes

    def _task(
        self, category: str, function: Callable[..., None], run: StepRun, *given: Any
    ) -> Task:
        """Return a task that writes the model.

        On CPUs of one kind any lane may run it, mostly that which is done last: it is awake. Else
        it runs where the user's module is.
        """
        return Task(
            function,
            given,
            lane=None if self._any_lane else self._engine.first_lane,
            name=f"{category} {run.number}",
            category=category,
            writes=(self._model,),
            modes=PLAIN,
            story={"step": run.number},
            quiet=True,
        )

    def _open(self, attempt: Attempt) -> None:
        """Take the model's buffers as the step's opening values."""
        if not self._overlap:
            attempt.clock.data_are_there()
        self._runner.replicas.open_step()
        attempt.before = self._runner.watch.states()
        if self._overlap:
            self._runner.replicas.refuse_written()

    def _end(self, run: StepRun, found: list[dict[int, Leaf]]) -> None:
        """Finish a step whose shards are all there."""
        attempt = run.attempt
        if attempt.dropped:
            raise ClosedError(f"step {run.number} was dropped")
        if self._runner.watch.drew(attempt.before):
            raise _DrawsSeenError(f"step {run.number} drew from the default generator")
        assert attempt.tree is not None
        by_shard: Mapping[int, Leaf] = {
            shard: leaf for leaves in found for shard, leaf in leaves.items()
        }
        tops = attempt.tree.take_tops()
        if self._runner.team.exchange is None:
            (root,) = tops
        else:
            by_shard, root = self._exchange_with_peers(
                self._runner.team.exchange, run, by_shard, tops
            )
        run.finish(run, [by_shard.get(shard) for shard in range(len(attempt.cut.bounds))], root)
        run.finished = True
        self._runner.team.note(f"done with step {run.number}")
        self._timekeeper.step_ended(run.number, attempt.clock)

    def _exchange_with_peers(
        self, exchange: Exchange, run: StepRun, leaves: Mapping[int, Leaf], tops: list[NodeSum]
    ) -> tuple[Mapping[int, Leaf], NodeSum]:
        attempt, team = run.attempt, self._runner.team
        sending = attempt.sending
        assert sending is not None
        way = (Way.COMPILED if attempt.programs else Way.EAGER) if leaves else Way.NONE
        report = exchange.report(attempt.trees, run.place, leaves, tops, sending, way)
        team.note(f"exchanging step {run.number}")
        attempt.told = True
        began_s = time.perf_counter()
        complete = exchange.complete(attempt.trees, attempt.cut.weights, report, sending)
        attempt.clock.exchange_s = time.perf_counter() - began_s
        return complete

    # ---- when something is in the way

    def _wait_for(self, end: Task) -> None:
        """Wait for a step's last task; give up a device that stands still meanwhile."""
        engine, attempt = self._engine, self._runs[0].attempt
        while not engine.wait_for(end, timeout_s=_LOOK_EVERY_S):
            alive = set(range(len(engine.devices))) - engine.lost_lanes
            for lane in attempt.stuck_lanes(alive, self._lost_after_s):
                engine.lose(lane)

    def _can_mend(self, run: StepRun, error: BaseException) -> bool:
        """Say whether the step can be done again, with what was learnt from its failure."""
        watch, before = self._runner.watch, run.attempt.before
        if isinstance(error, AccumulatedTwiceError):
            self._runner.adds_once = False
            return True
        if type(error) in (BatchError, InputError):  # a batch or a model that was written to
            return False
        if isinstance(error, AgainError) or (isinstance(error, Exception) and watch.drew(before)):
            watch.note_draws(before, restore=not self._overlap or watch.is_first_step)
            return True
        assert run.end is not None
        if run.end.cause is run.end:  # the update may have begun
            return False
        self._engine.give_up_device_of(run.end)
        lost = self._engine.lost_lanes
        newly_lost = lost - self._lost
        if not newly_lost or not self._runner.replicas.can_do_without(lost):
            return False
        self._lost = lost
        for lane in sorted(newly_lost):
            logger.warning(
                f"{self._engine.devices[lane]} was lost in step {run.number} ({error}): the other "
                f"devices go on without it, with the same result"
            )
        return True

    def _tell(self, attempt: Attempt, place: Place, verdict: Verdict, story: str = "") -> None:
        """Let the other processes know what becomes of a step, unless they do."""
        exchange = self._runner.team.exchange
        if exchange is not None and not attempt.told:
            attempt.told = True
            exchange.tell(place, verdict, story)

    def _drop_gradients(self, attempt: Attempt) -> None:
        """Let the other processes have what they wait for, though nobody wants it any more."""
        if attempt.sending is not None:
            attempt.sending.drop()

    def _failure_of(self, end: Task) -> BaseException | None:
        """Return what a step's last task failed with.

        Where somebody wrote the model meanwhile (torch notices, and fails a shard), say so.
        """
        failure = self._engine.failure_of(end)
        early = isinstance(failure, (_DrawsSeenError, AgainError, PeerError))
        before_update = end.cause is not end or early
        if failure is not None and self._overlap and before_update:
            try:
                self._runner.replicas.refuse_written()
            except InputError as written:
                written.__cause__ = failure
                return written
        return failure

    def _start_again(self) -> None:
        self._drop_all()
        runs = [*self._runs]
        self._forget_runs()
        for run in runs:
            run.attempt = run.attempt.afresh()
            self.start(run)

    def _forget_runs(self) -> None:
        self._runs.clear()
        self._runner.replicas.abandon_step()
        self._model = self._engine.Var(None, "the model")  # the old one's writer failed

    def _drop_all(self) -> None:
        """Let no further task begin, and wait for those that run."""
        for run in self._runs:
            run.attempt.drop()
        for run in self._runs:
            if run.end is not None and run.end.was_submitted:
                self._engine.drain(run.end)


class _DrawsSeenError(EvenstepError):
    """A step drew random numbers without generators of its own: it must be done again."""


def _spelled(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
