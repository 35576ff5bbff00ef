"""Checks the contract of a step in a training's first step, and again at the interval asked for."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from evenstep.batch import Batch
from evenstep.batch.cut import NO_CUT, Cut
from evenstep.contract.adding_up.separable import Neighbours
from evenstep.contract.check import ContractReport, check_contract, check_order, check_sums
from evenstep.contract.module_state import kept
from evenstep.contract.outside.outer_module import refuse_outer_module
from evenstep.contract.rehearsal import Rehearsal, SentShard
from evenstep.contract.repeat import compute_observed, digests_of
from evenstep.engine import Engine
from evenstep.engine.task import is_device_failure
from evenstep.errors import ContractError, DeviceLostError, WrongSumError, text_of
from evenstep.options import Experiment, Faults
from evenstep.replicas import Replica, Replicas
from evenstep.shard.forward_backward import ShardWork
from evenstep.shard.lockstep import Alone, shard_here
from evenstep.shard.loss import ShardObjective

logger = logging.getLogger("evenstep")

_TRIES = 3  # steps in which a check may fail to run before it is given up
_COMPARED = 16  # shards whose losses the first check compares
_SHOWN = 300  # characters of an error of torch's, which may name every backend that it has


class SelfCheck:
    """Checks the code of a training on one or two shards of a batch, on the first device.

    A check is due in the first step, in the first after a resume or a change of the model's layers,
    and in the first whose batch has two shards here.

    Attributes:
        due_at: the number of the next step with a check.
        structure: the model's layers at the last check, as `Replicas.structure` has them.
        report: what the last check has found out; None before it.
    """

    def __init__(
        self,
        faults: Faults,
        experiment: Experiment,
        replicas: Replicas,
        engine: Engine,
        *,
        side_by_side: bool,
    ) -> None:
        self._every = faults.check_interval
        self._experiment = experiment
        self._replicas = replicas
        self._engine = engine
        self._side_by_side = side_by_side
        self._failed = set[int]()  # the steps in which it could not be made
        self._is_half_done = False  # all but the comparison of two shards
        self._later = 0  # later checks so far
        self._pair = 0  # which pair of shards the last of them has compared
        self._is_thorough = True  # the next check is the first of what it checks
        self.due_at: float = 0 if self._every else math.inf
        self.structure: Any = None if self._every else replicas.structure
        self.report: ContractReport | None = None

    def begin_again(self, step: int) -> None:
        """Check in step number `step` what is new in it."""
        self._is_half_done, self._failed = False, set()
        self._is_thorough = True
        self.due_at = math.inf if self._every is None else step

    def run(
        self,
        step: int,
        cut: Cut,
        seed: Callable[[int], int],
        objective: ShardObjective,
        limit_s: float = math.inf,
    ) -> None:
        """Check the code on a batch, before its step begins; no step may be in flight.

        An error of the user's code is left to the step, which meets it again.

        Raises:
            ContractError: the contract is broken.
            WrongSumError: gradients are added up wrongly.
            DeviceLostError: the device failed, or took longer; it is given up.
        """
        shards = _pair_of(cut)
        is_whole = len(shards) == 2 or self._experiment.shards == 1
        if self.structure is not self._replicas.structure:
            self.structure = self._replicas.structure
            self.begin_again(step)
        has_device = len(self._engine.lost_lanes) < len(self._engine.devices)
        if (
            not has_device
            or self._every is None
            or not shards
            or (self._is_half_done and not is_whole)
        ):
            return
        lane = self._engine.first_lane
        is_thorough = self._is_thorough or self._every != math.inf
        error = self._engine.run_and_wait(
            self._check if is_thorough else self._check_again,
            cut,
            functools.partial(self._rehearsal, cut, shards, seed, objective),
            name="check the contract",
            category="check",
            limit_s=limit_s,
        ).error
        if isinstance(error, ContractError | WrongSumError):
            self.structure = None
            raise error
        if error is not None and is_device_failure(error):
            self._engine.lose_failed(error, lane)
            raise error
        if error is not None:
            self._failed.add(step)  # once for a step that fails too, and is tried again
            logger.debug("the contract could not be checked", exc_info=error)
        has_given_up = len(self._failed) == _TRIES
        if has_given_up:
            logger.warning(
                f"the contract of a step could not be checked in {_TRIES} steps, so code that "
                f"breaks it would not be noticed: {type(error).__name__}: "
                f"{error and textwrap.shorten(text_of(error), _SHOWN, placeholder=' ...')}"
            )
        self._is_half_done = error is None
        if has_given_up or (error is None and is_whole):
            self._say_what_is_unjudged()
            self._is_half_done, self._failed = False, set()
            self._is_thorough = False
            self.due_at = step + self._interval_after(step)

    def is_due_everywhere(self, step: int, began_at: int) -> bool:
        """Whether all processes compute a shard of step number `step` together.

        It depends on nothing that a process has for itself: each must do the same. `began_at` is
        the first step since the trainer was opened.
        """
        if self._every is None:
            return False
        is_repeated = not step & (step + 1) if self._every == math.inf else not step % self._every
        return is_repeated or step == began_at

    def results_of(
        self, sent: SentShard, objective: ShardObjective, limit_s: float = math.inf
    ) -> dict[str, str] | None:
        """Compute a shard on a new copy of the model; no step may be in flight.

        Returns:
            The digest of each tensor that the shard gives, by name; None if the device has failed,
            or has too little memory.

        Raises:
            Exception: the error of the user's code.
        """
        if len(self._engine.lost_lanes) == len(self._engine.devices):
            return None
        try:
            task = self._engine.run_and_wait(
                self._results,
                sent,
                objective,
                name="compare the processes",
                category="check",
                limit_s=limit_s,
            )
        except DeviceLostError:
            return None
        error = task.error
        if is_device_failure(error) or isinstance(error, MemoryError | torch.OutOfMemoryError):
            return None
        if error is not None:
            raise error
        digests: dict[str, str] = task.result
        return digests

    def _results(self, sent: SentShard, objective: ShardObjective) -> dict[str, str]:
        self._replicas.open_step()
        replica = self._replicas.of_lane(self._engine.lane_here)
        work = ShardWork(
            sent.number,
            sent.take(self._experiment.placement(replica.device)),
            sent.examples,
            sent.divisor,
            lambda: sent.seed,
            self._experiment.autocast_dtype,
        )
        rehearsal = Rehearsal(replica, self._replicas.fresh_copy, [work], objective)
        copied = rehearsal.copy() or replica
        with kept(replica), self._apart(NO_CUT, rehearsal):
            return digests_of(copied, compute_observed(copied, work, objective))

    def _interval_after(self, step: int) -> float:
        """Return the steps until the next check: as many as were taken, unless it was asked for."""
        assert self._every is not None
        return self._every if self._every != math.inf else step + 1

    def _say_what_is_unjudged(self) -> None:
        if self.report is not None and self.report.unjudged and self._experiment.separable:
            logger.info(
                f"could not check whether the loss adds up over shards: {self.report.unjudged}"
            )

    def _check(self, cut: Cut, rehearse: Callable[[], Rehearsal]) -> None:
        rehearsal = rehearse()
        neighbours = self._neighbours(cut, _spread(cut.part.run), rehearsal.replica)
        separable = self._experiment.separable
        with self._apart(cut, rehearsal):
            refuse_outer_module(self._replicas.home, self._copy_of(rehearsal), rehearsal)
            self.report = check_contract(rehearsal, neighbours, separable=separable)
        logger.debug(f"the contract of a step was checked in {self.report.seconds:.3f} s")

    def _check_again(self, cut: Cut, rehearse: Callable[[], Rehearsal]) -> None:
        """Check sums and order in turn: together they would cost more than 1 % of 1,000 steps."""
        rehearsal = rehearse()
        self._later += 1
        with self._apart(cut, rehearsal):
            if self._experiment.separable and self._later % 2:
                neighbours = self._neighbours(cut, self._next_pair(cut), rehearsal.replica)
                check_sums(rehearsal, neighbours, compares_gradients=False)
            else:
                check_order(rehearsal)

    def _next_pair(self, cut: Cut) -> Sequence[int]:
        """Return two neighbouring shards, so that all shards have had their turn soon."""
        pairs = [*itertools.pairwise(cut.part.run)]
        pairs = [*pairs[::2], *pairs[1::2]]
        self._pair += not self._side_by_side  # such shards may number their rows from the first
        return pairs[self._pair % len(pairs)] if pairs else ()

    def _neighbours(self, cut: Cut, shards: Sequence[int], replica: Replica) -> Neighbours:
        """Return shards to compare: none of the user's own, which may not fit together."""
        place = self._experiment.placement(replica.device)

        def take(some: Sequence[int]) -> tuple[Batch, int]:
            examples = sum(cut.bounds[shard][1] - cut.bounds[shard][0] for shard in some)
            batch = cut.take(some[0], place) if len(some) == 1 else cut.join(some, place)
            return batch, examples

        return Neighbours(shards if cut.can_join else (), take)

    def _rehearsal(
        self, cut: Cut, shards: Sequence[int], seed: Callable[[int], int], objective: ShardObjective
    ) -> Rehearsal:
        self._replicas.open_step()
        replica = self._replicas.of_lane(self._engine.lane_here)
        place = self._experiment.placement(replica.device)
        works = [
            ShardWork(
                shard,
                cut.take(shard, place),
                None if cut.filled == 1 else cut.bounds[shard][1] - cut.bounds[shard][0],
                cut.divisor,
                functools.partial(seed, shard),
                self._experiment.autocast_dtype,
            )
            for shard in shards
        ]
        return Rehearsal(replica, self._replicas.fresh_copy, works, objective)

    def _copy_of(self, rehearsal: Rehearsal) -> Replica | None:
        """Return a copy of the model on a CPU, of another device or a new one; None elsewhere."""
        home = self._replicas.home
        if home.device.is_accelerator:
            return None
        others = [one for one in self._replicas.all if one is not home]
        copies = [one for one in others if not one.device.is_accelerator]
        return copies[0] if copies else rehearsal.copy()

    @contextmanager
    def _apart(self, cut: Cut, rehearsal: Rehearsal) -> Iterator[None]:
        """Inside `with`, a shard can't see others, unless the batch's shards meet."""
        here: Alone | Literal["apart"] | None = None
        if not rehearsal.works[0].is_only_shard:
            if not self._side_by_side:
                here = "apart"
            elif rehearsal.replica.device.is_accelerator:
                here = Alone()
        outside = shard_here.set(here)
        try:
            yield
        except ContractError:
            cut.refuse_written_copies()  # says it more exactly
            raise
        finally:
            shard_here.reset(outside)


def _pair_of(cut: Cut) -> list[int]:
    """Return two neighbouring shards of this process, of one size if possible; or its only one.

    What a shard leaves behind may depend on its size.
    """
    shards = [*cut.part.run]
    sizes = {shard: cut.bounds[shard][1] - cut.bounds[shard][0] for shard in shards}
    equal = [[*two] for two in itertools.pairwise(shards) if sizes[two[0]] == sizes[two[1]]]
    return equal[0] if equal else shards[:2]


def _spread(shards: Sequence[int]) -> list[int]:
    """Return shards that lie evenly among these, at most `_COMPARED` of them."""
    last = min(len(shards), _COMPARED) - 1
    return [shards[round(place * (len(shards) - 1) / max(1, last))] for place in range(last + 1)]
