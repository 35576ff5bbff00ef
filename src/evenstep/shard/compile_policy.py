"""Decides whether a trainer's shards are compiled (`compile=True`), and measures what it gains.

Compiled code adds in a different order than torch's own kernels do. So whether a shard is compiled
is a function of the experiment and the shard, never of the device or of timing. Where compiling
does not pay, a log line says so, and the user's choice stands.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Callable

import torch

from evenstep.batch import Batch, Cut
from evenstep.batch.rng import ShardRandomness
from evenstep.devices import intra_op_threads
from evenstep.errors import ModelError
from evenstep.options.experiment import Experiment
from evenstep.replicas import Replica, Replicas
from evenstep.shard.compiler import NotCompiledError, Outcome, Program, ShardCompiler
from evenstep.shard.loss import ShardObjective
from evenstep.shard.partial_sum import HALF_PRECISION

logger = logging.getLogger("evenstep")

_MEASURED_S = 0.5  # for each of the two, about
_MOST_REPEATS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hybridized:
    """The result of compiling a trainer's shards.

    Attributes:
        compile_s: the seconds spent on compiling and comparing so far; no part of a step's time.
        shard_ms: the milliseconds that the first batch's first shard takes compiled; 0 where it
            isn't compiled.
        eager_ms: the milliseconds that it takes without compiling.
        max_difference: the largest difference between compiled and eager gradients, relative to
            the largest gradient.
        why_not: why shards are computed eagerly; "" where they are compiled.
    """

    compile_s: float = 0.0
    shard_ms: float = 0.0
    eager_ms: float = 0.0
    max_difference: float = 0.0
    why_not: str = ""

    def __str__(self) -> str:
        if self.why_not:
            return f"compile: shards are computed eagerly, because {self.why_not}"
        pays = self.shard_ms < self.eager_ms
        return (
            f"compile: a shard takes {self.shard_ms:.3g} ms compiled and {self.eager_ms:.3g} ms "
            f"eagerly{'' if pays else ', so compiling does not pay here'}; max difference of the "
            f"gradients {self.max_difference:.0e}; compiled in {self.compile_s:.1f} s (not counted "
            f"as training)"
        )


_ROUNDING, _NARROW = 0.01, 0.3
"""The largest differences that rounding makes in float32, and in half precision."""


class ShardPrograms:
    """Finds the compiled programs for the shards of each step, in the thread that begins it.

    The first step decides for the whole training whether shards are compiled: changing that later
    would change bits.

    Args:
        experiment: the choices that the result depends on.
        replicas: the replicas of the model.

    Attributes:
        result: the result of compiling so far; a different object after more was compiled.
        compiles: whether shards are compiled; None before the first step.
    """

    def __init__(self, experiment: Experiment, replicas: Replicas) -> None:
        self._experiment = experiment
        self._replicas = replicas
        self._home: Replica | None = None
        self._compiler: ShardCompiler | None = None
        self.result = Hybridized()
        self.compiles: bool | None = None

    def of(self, cut: Cut, objective: ShardObjective) -> dict[int, Program]:
        """Return the program for each size of this process's shards; empty where they are eager.

        Raises:
            ModelError: the objective uses a different model than it is given, a shard can't be
                compiled though earlier ones were, or there are too many programs.
        """
        before, began_s = self.result, time.perf_counter()
        if self.compiles is False:
            if not before.why_not:
                self.result = Hybridized(why_not="they were before the checkpoint")
                logger.warning(str(self.result))
            return {}
        try:
            programs = self._find(cut, objective)
        except NotCompiledError as error:
            if self.compiles:
                raise ModelError(
                    f"the shards of this training were compiled so far, but here {error}: "
                    f"computing them eagerly would give other bits"
                ) from error
            self.compiles, programs = False, {}
            self.result = Hybridized(why_not=str(error))
        if self.result is not before:
            spent_s = before.compile_s + time.perf_counter() - began_s
            self.result = dataclasses.replace(self.result, compile_s=spent_s)
            if before == Hybridized():
                logger.warning(str(self.result))
        if programs:
            self.compiles = True
        return programs

    def _find(self, cut: Cut, objective: ShardObjective) -> dict[int, Program]:
        compiler = self._compiler_for(objective)
        place = self._experiment.placement(self._replicas.home.device)
        found: dict[int, Program] = {}
        for shard in cut.part.run:
            lo, hi = cut.bounds[shard]
            if hi - lo in found:
                continue
            example, compiled = cut.take(shard, place), compiler.compiled
            examples = None if cut.filled == 1 else hi - lo
            found[hi - lo] = program = compiler.program(example, examples=examples)
            if compiler.compiled > compiled and self.result == Hybridized():
                self.result = self._compare(compiler, program, example, examples)
            elif compiler.compiled > compiled:
                self.result = dataclasses.replace(self.result)
        return found

    def _compiler_for(self, objective: ShardObjective) -> ShardCompiler:
        if self._compiler is None or self._home is not self._replicas.home:  # layers were changed
            if not self._replicas.on_cpus:
                raise NotCompiledError("it compiles for CPUs only")
            self._home, experiment = self._replicas.home, self._experiment
            self._compiler = ShardCompiler(
                self._home.module, objective, experiment.threads, experiment.autocast_dtype
            )
        return self._compiler

    def _compare(
        self, compiler: ShardCompiler, program: Program, example: Batch, examples: int | None
    ) -> Hybridized:
        """Compare the compiled shard with the eager one: its gradients, and its time."""
        home = self._replicas.home
        parameters = [parameter.detach() for parameter in home.parameters]

        def compiled() -> Outcome:
            return program.run(parameters, home.buffers, example)

        def eager() -> Outcome:
            return compiler.eager(example, examples=examples)

        with intra_op_threads(self._experiment.threads):
            with ShardRandomness(lambda: 0):
                ours = compiled()
            with ShardRandomness(lambda: 0):
                theirs = eager()
            with ShardRandomness(lambda: 0):
                shard_s, eager_s = _timed(compiled, eager)
        difference = _difference(ours, theirs)
        if not difference <= self._allowed:
            raise NotCompiledError(
                f"the gradients of a compiled shard differ from the eager ones by "
                f"{difference:.2g} times the largest: more than rounding, so torch's compiler is "
                f"wrong here"
            )
        return Hybridized(shard_ms=1e3 * shard_s, eager_ms=1e3 * eager_s, max_difference=difference)

    @property
    def _allowed(self) -> float:
        """The difference that rounding may make, relative to the largest gradient."""
        kinds = {one.dtype for one in self._replicas.home.parameters}
        is_narrow = self._experiment.autocast_dtype or not kinds.isdisjoint(HALF_PRECISION)
        return _NARROW if is_narrow else _ROUNDING


def _timed(*calls: Callable[[], object]) -> list[float]:
    """Return the seconds that each call takes: medians of interleaved calls."""
    taken_s: list[list[float]] = [[] for _ in calls]
    end_s = time.perf_counter() + _MEASURED_S * len(calls)
    for _ in range(_MOST_REPEATS):
        for seconds, call in zip(taken_s, calls, strict=True):
            began_s = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began_s)
        if time.perf_counter() >= end_s:
            break
    return [statistics.median(seconds) for seconds in taken_s]


def _difference(ours: Outcome, theirs: Outcome) -> float:
    """Return the largest difference of the gradients, relative to the largest gradient.

    The eager pass has none for layers that reentrant checkpoints recompute.
    """
    largest = difference = 0.0
    for mine, its in zip(ours.gradients, theirs.gradients, strict=True):
        if its is not None and its.numel():
            mine = torch.zeros_like(its) if mine is None else mine
            is_same = (mine == its) | (mine.isnan() & its.isnan())
            apart = (mine - its).abs().masked_fill(is_same, 0).nan_to_num(nan=math.inf)
            largest = max(largest, its.abs().max().item())
            difference = max(difference, apart.max().item())
    return difference / largest if largest else difference
