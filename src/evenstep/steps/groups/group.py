"""The processes that train together, as one of them sees them: here a process that trains alone.

A group answers what a process must know besides its own devices: which shards are its own, which
part of a batch to load, how a step's partial sums become one, and when all processes stop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from evenstep.batch import Batch, Part
from evenstep.batch.cut import Cut, cut_whole_batch
from evenstep.data import Cursor
from evenstep.data.adapters.sources import Source
from evenstep.distributed.step_report import NO_DIGEST
from evenstep.steps.groups.same_shard import Compute
from evenstep.steps.reducer import LocalReducer

State: TypeAlias = "Callable[[], tuple[Mapping[str, Any], Mapping[str, str]]]"
"""Returns what must be the same in all processes: tensors by name, and settings by name."""


class Group:
    """A process that trains alone.

    Args:
        batch_dim: the dimension that the examples of a batch lie along.

    Attributes:
        reducer: turns the partial sums of a step into one.
        is_alone: whether there are no other processes.
        is_first: whether this process is the one that writes files.
        differences: what makes the processes round differently, in words; empty if nothing does.
        in_hand: of the batch that `batches` has yielded last; None for a whole batch.
        cut: `cut(batch, shards, step)` cuts this process's part of the batch of a step.
    """

    is_alone = True
    is_first = True
    differences = ""
    in_hand: Part | None = None

    def __init__(self, batch_dim: int = 0) -> None:
        self.reducer = LocalReducer()
        self.cut: Callable[[Batch, int, int], Cut] = functools.partial(
            cut_whole_batch, dim=batch_dim
        )
        self._batch_dim = batch_dim
        self._stop_asked = False

    def without_others(self) -> Group:
        """Return the group of this process alone, when the others are gone."""
        group = Group(self._batch_dim)
        group._stop_asked = self._stop_asked
        return group

    def batches(
        self,
        source: Source,
        cursor: Cursor,
        steps_done: Callable[[], int],
        call: str,
        *,
        whole: bool = False,
    ) -> Iterator[Batch]:
        """Yield this process's part of the data's batches from `cursor` on.

        Args:
            source: the data.
            cursor: the first batch.
            steps_done: returns the number of the step that trains on the next batch.
            call: the trainer's method that they are for.
            whole: whether each process gets whole batches.
        """
        return source.epoch(cursor)

    def compare_ends(self, source: Source, call: str) -> None:
        """Compare what an epoch was with the other processes.

        Args:
            source: the data.
            call: the trainer's method that they were for.
        """

    def by_the_first(self, function: Callable[[], Path]) -> Path:
        """Call `function` in the first process only; return its result everywhere."""
        return function()

    def measured_of_all(
        self, own: Sequence[Mapping[str, Any]], names: Sequence[str], outputs: str
    ) -> list[dict[str, Any]]:
        """Return the metrics of all shards from those of this process's shards.

        Args:
            own: for each shard, what its metrics returned.
            names: the metrics.
            outputs: the one that returned tensors, if there is one of this name; the others
                returned (total, count).
        """
        return [{**shard} for shard in own]

    def outputs_of_all(self, own: Sequence[Batch], call: str = "predict") -> list[Batch]:
        """Return the outputs of all shards from those of this process's shards."""
        return [*own]

    def digest_of(self, batch: Batch, *, is_due: bool) -> int:
        """Return the digest of a batch if the processes compare it in this step.

        Args:
            batch: a step's batch.
            is_due: whether to compare it; the first whole one is compared in any case.
        """
        return NO_DIGEST

    def refuse_other_results(
        self,
        step: int,
        cut: Cut,
        seed: Callable[[int], int],
        compute: Compute,
        attributes: Mapping[str, str],
    ) -> None:
        """Compute one shard in every process, and compare the bits.

        Args:
            step: the number of the step, which has not begun.
            cut: its batch.
            seed: returns the seed of a shard's random numbers.
            compute: computes a shard.
            attributes: the modes, numbers and strings of the model's layers, by name.
        """

    def cut_compared(
        self, batch: Batch, shards: int, step: int, place: tuple[str, int], before: Part | None
    ) -> Cut:
        """Compare a batch to evaluate with that of the other processes, and cut this one's part.

        Args:
            batch: the batch.
            shards: V, the number of shards.
            step: the number of steps done.
            place: the trainer's method that it is for, and its number among that one's batches.
            before: what was `in_hand` before the call.
        """
        return self.cut(batch, shards, step)

    def compare_states(self, state: State, step: int, call: str) -> None:
        """Compare the state after `step` steps with that of the other processes.

        Args:
            state: what to compare.
            step: the number of steps done.
            call: the trainer's method that compares.
        """

    def note(self, doing: str) -> None:
        """Publish what this process is doing, for processes that wait for it."""

    def ask_to_stop(self) -> None:
        """Stop all processes before the same step."""
        self._stop_asked = True

    def should_stop(self, steps_done: int) -> bool:
        """Return whether step `steps_done` must not be taken."""
        return self._stop_asked
