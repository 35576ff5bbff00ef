"""Checks the contract of a step in a training's first step, and again at the interval asked for."""

from __future__ import annotations

import functools
import logging
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from evenstep.batch import Batch
from evenstep.batch.cut import Cut
from evenstep.contract.check import ContractReport, check_contract
from evenstep.contract.outer_module import refuse_outer_module
from evenstep.engine import Engine
from evenstep.errors import ContractError, InputError, shown, text_of
from evenstep.experiment import Experiment
from evenstep.replicas import Replicas
from evenstep.shard.forward_backward import ShardWork
from evenstep.shard.lockstep import shard_here
from evenstep.shard.loss import ShardObjective

logger = logging.getLogger("evenstep")

_TRIES = 3  # steps in which a check may fail to run before it is given up
_SHOWN = 300  # characters of an error of torch's, which may name every backend that it has


class SelfCheck:
    """Checks the code of a training on one or two shards of a batch, on the first device.

    A check is due in the first step, in the first after a resume or a change of the model's layers,
    and in the first whose batch has two shards here.

    Args:
        check: "first", "off", or "every N" steps.
        experiment: the choices that the result depends on.
        replicas: the replicas of the model.
        engine: runs the check in a lane.
        side_by_side: whether a batch's shards can call `all_gather`.

    Attributes:
        due_at: the number of the next step with a check.
        structure: the model's layers at the last check, as `Replicas.structure` has them.
        report: what the last check has found out; None before it.

    Raises:
        InputError: `check` is none of these.
    """

    def __init__(
        self,
        check: str,
        experiment: Experiment,
        replicas: Replicas,
        engine: Engine,
        *,
        side_by_side: bool,
    ) -> None:
        self._every = _interval(check)
        self._experiment = experiment
        self._replicas = replicas
        self._engine = engine
        self._side_by_side = side_by_side
        self._failed = set[int]()  # the steps in which it could not be made
        self._is_half_done = False  # all but the comparison of two shards
        self.due_at: float = 0 if self._every else math.inf
        self.structure: Any = None if self._every else replicas.structure
        self.report: ContractReport | None = None

    def begin_again(self, step: int) -> None:
        """Check in step number `step` what is new in it."""
        self._is_half_done, self._failed = False, set()
        self.due_at = math.inf if self._every is None else step

    def run(
        self,
        step: int,
        cut: Cut,
        seed: Callable[[int], int],
        objective: ShardObjective,
    ) -> None:
        """Check the code on a batch, before its step begins; no step may be in flight.

        An error that is not about the contract is left to the step, which meets it again.

        Args:
            step: the step's number.
            cut: the batch.
            seed: returns the seed of a shard's random numbers.
            objective: computes a shard's loss as (total, count).

        Raises:
            ContractError: the contract is broken.
        """
        shards = [*cut.part.run][:2]
        is_whole = len(shards) == 2 or self._experiment.shards == 1
        if self.structure is not self._replicas.structure:
            self.structure = self._replicas.structure
            self.begin_again(step)
        if self._every is None or not shards or (self._is_half_done and not is_whole):
            return
        error = self._engine.run_and_wait(
            self._check,
            cut,
            shards,
            functools.partial(seed, shards[0]),
            objective,
            name="check the contract",
            category="check",
        ).error
        if isinstance(error, ContractError):
            self.structure = None
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
            self.due_at = step + self._every

    def _say_what_is_unjudged(self) -> None:
        if self.report is not None and self.report.unjudged and self._experiment.separable:
            logger.info(
                f"could not check whether the loss adds up over shards: {self.report.unjudged}"
            )

    def _check(
        self,
        cut: Cut,
        shards: Sequence[int],
        seed: Callable[[], int],
        objective: ShardObjective,
    ) -> None:
        self._replicas.open_step()
        replica = self._replicas.all[self._engine.lane_here]
        place = self._experiment.placement(replica.device)
        first, *others = shards
        examples = [hi - lo for lo, hi in cut.bounds]
        work = ShardWork(
            first,
            cut.take(first, place),
            None if cut.filled == 1 else examples[first],
            seed,
            self._experiment.autocast_dtype,
        )
        pair: list[tuple[Batch, int]] = []
        if others and cut.can_join:
            pair = [(cut.join(shards, place), sum(examples[shard] for shard in shards))]
            pair += [(cut.take(shard, place), examples[shard]) for shard in shards]
        meets_others = self._side_by_side or work.alone
        outside = shard_here.set(None if meets_others else "apart")
        try:
            alone = len(self._engine.devices) == 1
            refuse_outer_module(self._replicas, work, objective, alone=alone)
            self.report = check_contract(
                replica,
                work,
                pair,
                objective,
                separable=self._experiment.separable,
            )
        except ContractError:
            cut.refuse_written_copies()  # says it more exactly
            raise
        finally:
            shard_here.reset(outside)
        logger.debug(f"the contract of a step was checked in {self.report.seconds:.3f} s")


def _interval(check: str) -> float | None:
    """Return the steps between two checks; None for no checks."""
    words = check.split() if isinstance(check, str) else []
    if words == ["off"]:
        return None
    if words == ["first"]:
        return math.inf
    match = re.fullmatch(r"every 0*([1-9][0-9]{0,17})", " ".join(words))
    if match is not None:
        return int(match[1])
    raise InputError(f'got check={shown(check)}: give "first", "off" or "every N"')
