"""`hybridize` in a trainer: which shards run compiled, and what came of it.

Compiled code adds in another order than torch's own kernels do. So whether a shard is compiled is a
function of the experiment and the shard, never of the device or of timing; where compiling does not
pay it is said, and the user's choice stands.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections.abc import Callable

from evenstep.batch import Batch, Cut
from evenstep.batch.rng import ShardRandomness, undrawn
from evenstep.devices import intra_op_threads
from evenstep.errors import ModelError
from evenstep.experiment import Experiment
from evenstep.replicas import Replica, Replicas
from evenstep.shard.compiler import NotCompiledError, Outcome, Program, ShardCompiler
from evenstep.shard.loss import ShardObjective

logger = logging.getLogger("evenstep")

_MEASURED_S = 0.5  # for each way, about
_MOST_REPEATS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hybridized:
    """What came of compiling a trainer's shards.

    Attributes:
        compile_s: seconds spent on it (and on comparing) so far; no part of any step's time.
        shard_ms: milliseconds of the first batch's first shard, compiled; 0 where it isn't.
        eager_ms: the same without compiling.
        max_difference: by how much the gradients of the two differ at most, over the largest one.
        why_not: why shards are computed eagerly; "" where they are compiled.
    """

    compile_s: float = 0.0
    shard_ms: float = 0.0
    eager_ms: float = 0.0
    max_difference: float = 0.0
    why_not: str = ""

    def __str__(self) -> str:
        if self.why_not:
            return f"hybridize: shards are computed eagerly, because {self.why_not}"
        pays = self.shard_ms < self.eager_ms
        return (
            f"hybridize{'' if pays else ' does not pay here'}: a shard takes "
            f"{self.shard_ms:.3g} ms compiled and {self.eager_ms:.3g} ms eagerly; max difference "
            f"of the gradients {self.max_difference:.0e}; compiled in {self.compile_s:.1f} s (not "
            f"counted as training)"
        )


class ShardPrograms:
    """The programs of the shards of steps, found by the thread that begins them.

    The first step decides whether a training's shards are compiled, for good: a shard that is
    computed in another way than before would move bits.

    Args:
        experiment: what is computed.
        replicas: of the model.

    Attributes:
        told: what came of it.
        compiles: whether shards are compiled; None before the first step.
    """

    def __init__(self, experiment: Experiment, replicas: Replicas) -> None:
        self._experiment = experiment
        self._replicas = replicas
        self._home: Replica | None = None
        self._compiler: ShardCompiler | None = None
        self.told = Hybridized()
        self.compiles: bool | None = None

    def of(self, cut: Cut, objective: ShardObjective) -> dict[int, Program]:
        """Return the program for each size of this process's shards; none where they are eager.

        Raises:
            ModelError: the objective takes the model from outside, a shard can't be compiled after
                others were, or there are too many programs.
        """
        told, began_s = self.told, time.perf_counter()
        if self.compiles is False:
            if not told.why_not:
                self._say(Hybridized(why_not="they were before the checkpoint"))
            return {}
        try:
            found = self._found(cut, objective)
        except NotCompiledError as error:
            if self.compiles:
                raise ModelError(
                    f"the shards of this training were compiled so far, but here {error}: other "
                    f"bits would come of computing them eagerly"
                ) from error
            self.compiles, found = False, {}
            self.told = Hybridized(why_not=str(error))
        if self.told is not told:  # something was compiled, or tried
            took_s = time.perf_counter() - began_s
            self.told = dataclasses.replace(self.told, compile_s=told.compile_s + took_s)
            if told == Hybridized():
                self._say(self.told)
        if found:
            self.compiles = True
        return found

    def _say(self, told: Hybridized) -> None:
        self.told = told
        logger.warning(str(told))

    def _found(self, cut: Cut, objective: ShardObjective) -> dict[int, Program]:
        compiler, alone = self._compiler_of(objective), cut.filled == 1
        place = self._experiment.placement(self._replicas.home.device)
        found: dict[int, Program] = {}
        for shard in cut.part.run:
            lo, hi = cut.bounds[shard]
            if hi - lo not in found:
                example = cut.take(shard, place)
                found[hi - lo] = self._program(compiler, example, alone=alone)
        return found

    def _compiler_of(self, objective: ShardObjective) -> ShardCompiler:
        if self._compiler is None or self._home is not self._replicas.home:  # layers were changed
            if not self._replicas.on_cpus:
                raise NotCompiledError("it compiles for CPUs only")
            self._home = self._replicas.home
            self._compiler = ShardCompiler(
                self._home.module,
                objective,
                self._experiment.threads,
                self._experiment.autocast_dtype,
            )
        return self._compiler

    def _program(self, compiler: ShardCompiler, example: Batch, *, alone: bool) -> Program:
        before = compiler.compiled
        program = compiler.program(example, alone=alone)
        if compiler.compiled > before:
            if self.told == Hybridized():
                self.told = self._compared(compiler, program, example, alone=alone)
            else:
                self.told = dataclasses.replace(self.told)
        return program

    def _compared(
        self,
        compiler: ShardCompiler,
        program: Program,
        example: Batch,
        *,
        alone: bool,
    ) -> Hybridized:
        """Compare the compiled shard with the eager one: its gradients, and its time."""
        assert self._home is not None
        parameters = [parameter.detach() for parameter in self._home.parameters]
        buffers = self._home.buffers

        def compiled() -> Outcome:
            return program.run(parameters, buffers, example)

        def eager() -> Outcome:
            return compiler.eager(example, alone=alone)

        with intra_op_threads(self._experiment.threads):
            with ShardRandomness(0):
                ours = compiled()
            with ShardRandomness(0):
                theirs = eager()
            with undrawn():
                shard_s, eager_s = _timed(compiled, eager)
        return Hybridized(
            shard_ms=1e3 * shard_s,
            eager_ms=1e3 * eager_s,
            max_difference=_difference(ours, theirs),
        )


def _timed(*ways: Callable[[], object]) -> list[float]:
    """Return the seconds of each way: medians of interleaved calls."""
    taken: list[list[float]] = [[] for _ in ways]
    while not taken[0] or (
        len(taken[0]) < _MOST_REPEATS and sum(map(sum, taken)) < _MEASURED_S * len(ways)
    ):
        for seconds, way in zip(taken, ways, strict=True):
            began_s = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - began_s)
    return [statistics.median(seconds) for seconds in taken]


def _difference(ours: Outcome, theirs: Outcome) -> float:
    pairs = [
        (mine, its)
        for mine, its in zip(ours.gradients, theirs.gradients, strict=True)
        if mine is not None and its is not None and mine.numel()
    ]
    largest = max((its.abs().max().item() for _, its in pairs), default=0.0)
    difference = max(((mine - its).abs().max().item() for mine, its in pairs), default=0.0)
    return difference / largest if largest else difference
