"""A step of training: which batch it trains on, and the attempt at it that is in progress."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeAlias

import torch

from evenstep.batch.assignment import ShardQueue
from evenstep.batch.cut import NO_CUT, Cut, Part
from evenstep.batch.seeds import shard_seed
from evenstep.collectives import Forest, TreeSum, forest
from evenstep.data.order import Cursor
from evenstep.distributed.gradient_reduce import GradientReduction
from evenstep.distributed.step_report import NO_DIGEST, Facts, batch_digest
from evenstep.engine import PendingNumber, Task
from evenstep.engine.handle import MissingName
from evenstep.errors import ClosedError, add_note, hides_own_frames
from evenstep.nn.slice_runners import SlicingDevices
from evenstep.profiling.clock import StepClock
from evenstep.replicas import Replica
from evenstep.shard.compiler import Program
from evenstep.shard.forward_backward import Leaf, ShardWork
from evenstep.shard.lockstep import Lockstep
from evenstep.shard.loss import ShardObjective
from evenstep.shard.partial_sum import PartialSum

SeedOf: TypeAlias = Callable[[int], int]
"""Returns the seed of a shard's random ops from the shard's number."""

Finish: TypeAlias = "Callable[[Step, Sequence[Leaf | None], PartialSum], None]"
"""Called in a lane with the step, the shards' (total, count), and the root of the tree."""


class Position(NamedTuple):
    """A position in a training: the steps done, and the place in the data.

    Attributes:
        steps_done: the steps since the start of the training.
        epoch, batch: the epoch, and the steps taken in it; the next step's random ops are seeded
            with these.
        data: the first batch that no step was taken on, of those that `Trainer.epoch` has not
            moved past; None before it yields one.
    """

    steps_done: int = 0
    epoch: int = 0
    batch: int = 0
    data: Cursor | None = None

    def at(self, data: Cursor) -> Position:
        """Return the position with a different place in the data, maybe in a later epoch."""
        if data.epoch > self.epoch:
            return Position(self.steps_done, data.epoch, 0, data)
        return self._replace(data=data)

    @property
    def cursor(self) -> Cursor:
        """The place in the data; of a loader of the user's own, the steps taken."""
        return self.seeds_at if self.data is None else self.data

    @property
    def seeds_at(self) -> Cursor:
        """What the next step's random ops are seeded with."""
        return Cursor(self.epoch, self.batch)


class Progress:
    """How far a training is.

    Attributes:
        position: the position before the next step.
        drawn: the place behind the last batch that `Trainer.epoch` has yielded.
    """

    def __init__(self) -> None:
        self.position = Position()
        self.drawn = Cursor()

    def count(self, step: Step) -> None:
        """Count a step, on the last batch that was drawn, unless this attempt is a later one."""
        done, epoch, batch, data = self.position
        if step.counts and step.number == done:
            data = None if data is None else self.drawn
            self.position = Position(done + 1, epoch, batch + 1, data)

    def go_back(self, step: Step) -> None:
        """Go back to the position before `step`, which was not taken.

        Its batch may be trained on again, until the loop draws the next one.
        """
        if step.number <= self.position.steps_done:  # one before it may be abandoned, too
            self.position = step.position

    def draw(self, place: Cursor) -> None:
        """Note that the batch at `place` was drawn."""
        self.position = self.position.at(place)
        self.drawn = Cursor(place.epoch, place.step + 1)

    def end_epoch(self, epoch: int) -> None:
        """Note that all batches of an epoch were drawn."""
        self.drawn = Cursor(epoch + 1)
        self.position = self.position.at(self.drawn)

    def resume(self, position: Position, drawn: Cursor) -> None:
        """Go to where a training was saved."""
        self.position, self.drawn = position, drawn


class Stoppable(Protocol):
    """Something that shards wait for."""

    def stop(self) -> None:
        """Let no shard wait any longer."""


def _not_open(replica: Replica, work: ShardWork) -> Any:
    raise AssertionError("the attempt is not open")


def _held_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclasses.dataclass(eq=False)
class AssignedWork:
    """What the lanes compute of an attempt: set by the executor.

    Attributes:
        compute: called in a lane with a replica and a shard's work.
        compute_together: called with the work of several shards; None where each is by itself.
        results: what `compute` returned, by shard.
        runs: the shards that each lane starts with.
        queue: the shards that no lane has begun; None before they are assigned, and in lockstep.
        one_lane: whether the fastest lane computes all shards.
        is_observed: whether somebody looks at each shard's values.
        programs: the compiled shards by their number of examples; empty for eager shards.
        lockstep: where shards meet that run side by side; None for independent shards.
        slicing: the devices that compute the slices of its shards together; None if they don't.
        turns: the turns of shards on the stages of a network; None without stages.
    """

    compute: Callable[[Replica, ShardWork], Any] = _not_open
    compute_together: Callable[..., Sequence[Leaf]] | None = None
    results: dict[int, Any] = dataclasses.field(default_factory=dict)
    runs: Sequence[Sequence[int]] = ()
    queue: ShardQueue | None = None
    one_lane: bool = False
    is_observed: bool = False
    programs: Mapping[int, Program] = dataclasses.field(default_factory=dict)
    lockstep: Lockstep | None = None
    slicing: SlicingDevices | None = None
    turns: Stoppable | None = None

    def stop(self) -> None:
        """Let no further shard begin, and none wait for another one."""
        if self.queue is not None:
            self.queue.dropped = True
        for waited_in in (self.lockstep, self.slicing, self.turns):
            if waited_in is not None:
                waited_in.stop()


@dataclasses.dataclass(eq=False)
class PendingSum:
    """The sum over the shards of an attempt: set by the reducer.

    Attributes:
        tree: the sum over the shards of a training step.
        sending: takes gradients for other processes; None in a single process.
    """

    tree: TreeSum[PartialSum] | None = None
    sending: GradientReduction | None = None


@dataclasses.dataclass(eq=False)
class Ending:
    """How far an attempt is, and how it ended: set by the pipeline.

    Attributes:
        has_opening: whether the buffers' opening values are its own, not those of a step before.
        dropped: whether no further shard, and no update, may begin.
        committed: whether its update has begun.
        reported: whether the other processes know how it ended.
        errors: by lane, what went wrong there.
        lock: held while `working`, `dropped` or `committed` changes.
        lanes: the lanes that compute it.
        working: those of them that have not ended.
        is_over: whether it has ended.
        ended: released at its end.
        task: its last task, where tasks of the engine compute it.
    """

    has_opening: bool = False
    dropped: bool = False
    committed: bool = False
    reported: bool = False
    errors: dict[int, BaseException] = dataclasses.field(default_factory=dict)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    lanes: frozenset[int] = frozenset()
    working: set[int] = dataclasses.field(default_factory=set)
    is_over: bool = False
    ended: threading.Lock = dataclasses.field(default_factory=_held_lock)
    task: Task | None = None


class Attempt:
    """One attempt at a batch's shards. An attempt that fails is thrown away whole.

    Attributes:
        number: the step's number.
        cut: the batch, cut into shards.
        seed: returns the seed of a shard's random ops.
        clock: its times.
        work: what the lanes compute.
        sum: the sum over its shards.
        ending: how far it is, and how it ended.
    """

    def __init__(self, number: int, cut: Cut, seed: SeedOf, ready_s: float | None = None) -> None:
        self.number = number
        self.cut = cut
        self.seed = seed
        self.clock = StepClock(ready_s)
        self.work = AssignedWork()
        self.sum = PendingSum()
        self.ending = Ending()

    def place_of(self, shard: int) -> str:
        """Return a shard's number, and in words of the user's what it has of the batch."""
        part = self.cut.part
        if part.own_shards is not None:
            return f"shard {shard} (your micro-batch {shard})"
        if shard >= len(part.bounds):  # the batch was released: the step is given up
            return f"shard {shard}"
        lo, hi = part.bounds[shard]
        examples = f"examples {lo} to {hi - 1}" if hi - lo > 1 else f"example {lo}"
        return f"shard {shard} ({examples} of your batch)"

    @property
    def trees(self) -> Forest:
        """The canonical tree, cut over the processes."""
        cut = self.cut
        return forest(len(cut.bounds), cut.filled, cut.part.runs)

    def again(self) -> Attempt:
        """Return a new attempt at the same batch."""
        return Attempt(self.number, self.cut, self.seed, self.clock.ready_s)

    def commit(self) -> None:
        """Begin the update: from here on the attempt can't be dropped.

        Raises:
            ClosedError: it was dropped before.
        """
        with self.ending.lock:
            if self.ending.dropped:
                raise ClosedError(f"step {self.number} was dropped")
            self.ending.committed = True

    def drop(self) -> None:
        """Let no further shard begin, no shard wait for another one, and no update begin."""
        with self.ending.lock:
            self.ending.dropped = self.ending.dropped or not self.ending.committed
        self.work.stop()


@dataclasses.dataclass(eq=False, kw_only=True)
class Step:
    """A step that was submitted: facts that stay, and an attempt that may be replaced.

    Attributes:
        number: of the steps that were done before it.
        position: the position in the training before the step.
        part: this process's part of the batch.
        objective: computes a shard's loss as (total, count).
        finish: ends the step, in a lane.
        updates: whether the step ends with the optimizer's update.
        may_compile: whether its shards may be compiled.
        counts: whether it is a step of the training, not one evaluation of a step's batch.
        observe: called with every shard's number and own value; None for nobody.
        settings: changes of the optimizer's groups since the step before.
        digest: of the whole batch, where several processes compare it.
        own: the gradients of the user's own that are added to the step's; empty for none.
        hooks: of the parameters' gradients when it was submitted, by the parameters' numbers.
        attempt: the current attempt at the batch.
        loss: the mean loss, once the step is finished.
        outputs: what the objective returned besides, once the step is finished.
        is_taken: whether the model has its update, or its gradients. From then on the step stays.
        finished: whether `finish` is through.
        closed: whether it was waited for, or given up.
        error: why the step was abandoned.
    """

    number: int
    position: Position
    part: Part
    objective: ShardObjective
    finish: Finish
    attempt: Attempt
    updates: bool = True
    may_compile: bool = True
    counts: bool = True
    observe: Callable[[int, PartialSum], None] | None = None
    settings: Sequence[Any] = ()
    digest: int = NO_DIGEST
    own: Sequence[torch.Tensor | None] = ()
    hooks: Mapping[int, Sequence[Callable[..., Any]]] = dataclasses.field(default_factory=dict)
    loss: float = math.nan
    outputs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_taken: bool = False
    finished: bool = False
    closed: bool = False
    error: BaseException | None = None

    @classmethod
    def of(
        cls,
        position: Position,
        cut: Cut,
        seed: int,
        *,
        objective: ShardObjective,
        finish: Finish,
        observe: Callable[[int, PartialSum], None] | None = None,
        settings: Sequence[Any] = (),
        digest: int = NO_DIGEST,
        may_compile: bool = True,
    ) -> Step:
        """Return the step that trains on a cut batch at `position`, with the experiment's seed."""
        seeds = functools.partial(shard_seed, seed, position.epoch, position.batch)
        attempt = Attempt(position.steps_done, cut, seeds)
        return cls(
            number=position.steps_done,
            position=position,
            part=cut.part,
            objective=objective,
            finish=finish,
            attempt=attempt,
            observe=observe,
            settings=settings,
            digest=digest,
            may_compile=may_compile,
        )

    @property
    def facts(self) -> Facts:
        """The facts about the step that must be the same in every process."""
        place, ends = self.position.cursor, (run.stop for run in self.part.runs)
        dense = tuple(one if one is None else one.to_dense() for one in self.own)
        own = batch_digest(dense, is_whole=True) if self.own else 0
        return self.number, place.epoch, place.step, self.part.examples, self.updates, own, *ends

    def note_taken(self, error: BaseException) -> None:
        """Say of an error that it came behind the update."""
        add_note(error, f"step {self.number} was taken: its update was made before this error")

    def release(self) -> None:
        """Forget the batch and what was computed: a kept loss must not keep them alive."""
        self.closed = True
        self.attempt.cut = NO_CUT
        self.attempt.work.compute = _not_open
        self.attempt.work.compute_together = None
        self.attempt.work.results = {}
        self.attempt.sum.tree = None
        self.own = ()


NO_BACKWARD = (
    "trainer.step has computed the gradients and updated the model already, so remove "
    "loss.backward() and optimizer.step() from the loop"
)
"""What to write instead of a backward pass through the loss of a step."""


class StepLoss(PendingNumber):
    """A handle of the mean loss of a step, computed before the step's update."""

    __slots__ = ("_step", "_wait")

    if not TYPE_CHECKING:  # which reports such names by itself
        backward = MissingName(NO_BACKWARD, "the loss")

    def __init__(self, step: Step, wait: Callable[[Step], None]) -> None:
        self._step = step
        self._wait = wait

    @property
    def description(self) -> str:
        """What it is, in a task's story."""
        return f"the loss of step {self._step.number}"

    def value_in_task(self) -> float:
        """Return the loss; only called once it is there."""
        return self._step.loss

    @property
    @hides_own_frames
    def outputs(self) -> Mapping[str, Any]:
        """What the objective returned besides (total, count), over all shards; waits for it."""
        self.wait_to_read()
        return self._step.outputs

    @hides_own_frames
    def wait_to_read(self) -> None:
        """Block until the step is finished; raise its error."""
        if not self._step.closed and self._step.error is None:
            self._wait(self._step)
        if self._step.error is not None:
            raise self._step.error

    def __iter__(self) -> NoReturn:  # which GradScaler asks for
        raise TypeError(
            "the loss of a step is one number, and can't be iterated. GradScaler has no use here: "
            'trainer.step has made the update, and precision="bf16" needs no scaler'
        )

    def __repr__(self) -> str:
        return repr(self.item())  # a number, as in a list of losses


StepLoss.__name__ += " (use float(loss))"  # what the error of `json.dumps` says
