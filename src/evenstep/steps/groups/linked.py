"""One of several processes that train together."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optree
import torch
from safetensors.torch import load, save

from evenstep.batch import Batch, Part, cut_batch, shard_bounds
from evenstep.batch.cut import Cut
from evenstep.batch.own_shards import Shards, cut_own_shards, only
from evenstep.checkpoint.fingerprint import tensor_digest
from evenstep.data import Cursor
from evenstep.data.adapters.sources import EXAMPLES, Source
from evenstep.distributed import Exchange, agree, follow_the_first, refuse_divergence
from evenstep.distributed.step_report import (
    NO_DIGEST,
    batch_digest,
    own_digest,
    refuse_other_batches,
)
from evenstep.errors import SaveError, text_of
from evenstep.steps.groups.group import Group, State
from evenstep.steps.groups.loop_draws import LoopDraws
from evenstep.steps.groups.same_shard import Compute, refuse_other_results
from evenstep.steps.outputs import pack_outputs, unpack_outputs
from evenstep.steps.reducer import ProcessReducer

logger = logging.getLogger("evenstep")


class LinkedGroup(Group):
    """One of several processes that train together.

    Args:
        reducer: reduces a step over all processes.
        shards: V, the number of shards of a batch.
        batch_dim: the dimension that the examples of a batch lie along.
        differences: what makes the processes round differently, in words.
    """

    is_alone = False

    def __init__(
        self, reducer: ProcessReducer, shards: int, batch_dim: int, differences: str
    ) -> None:
        super().__init__(batch_dim)
        self.differences = differences
        self.cut = self._cut
        self.reducer = reducer
        self.is_first = reducer.rank == 0
        self._reducer = reducer
        self._peers = reducer.peers
        self._shards = shards
        self._handed: Batch = ()  # what `batches` has yielded last
        self._is_first_batch = True
        self._is_first_own = True  # of the batches that a loop over parts has made itself
        self._draws = LoopDraws() if self.is_first else None
        self._said_whole: list[Source] = []

    def batches(
        self,
        source: Source,
        cursor: Cursor,
        steps_done: Callable[[], int],
        call: str,
        *,
        whole: bool = False,
    ) -> Iterator[Batch]:
        """Yield this process's part of each batch; only that part is loaded, where that works.

        A part is fixed when it is fetched, some batches ahead of the steps with worker processes.
        Otherwise the whole batches are yielded.
        """
        facts = {**source.facts(cursor), "the next batch": [cursor.epoch, cursor.step]}
        if self.differences:
            facts.pop(EXAMPLES, None)  # if they are computed, they are rounded differently, too
        agree(self._peers, facts, "the data", call)
        if whole or not source.fetches_parts:
            yield from self._whole_batches(source, cursor, is_wanted=whole)
            return
        fetched: dict[int, Part] = {}
        upcoming = cursor.step

        def part(number: int, examples: int) -> Part:
            fetched[number] = self._part(examples, steps_done() + number - upcoming)
            return fetched[number]

        outer = own = self.in_hand  # of a loop around this one, such as an epoch that evaluates
        outer_handed = self._handed
        try:
            for number, batch in enumerate(source.epoch(cursor, part), cursor.step):
                upcoming = number + 1
                self.in_hand, self._handed = fetched.pop(number), batch
                own = self.in_hand
                if self._draws is not None:
                    self._draws.begin(own)
                yield batch
        finally:
            if self.in_hand is own:
                self.in_hand, self._handed = outer, outer_handed

    def _whole_batches(self, source: Source, cursor: Cursor, *, is_wanted: bool) -> Iterator[Batch]:
        if self.is_first and not is_wanted and source not in self._said_whole:
            logger.warning(
                "every process loads whole batches of the %s: %s", source.name, source.whole_because
            )
        self._said_whole = [source]
        outer = self.in_hand  # of a loop around this one
        try:
            for batch in source.epoch(cursor):
                self.in_hand = None
                yield batch
        finally:
            self.in_hand = outer

    def _cut(self, batch: Batch, shards: int, step: int) -> Cut:
        """Cut this process's part of the batch of step `step` into shards."""
        if batch and type(batch[0]) is Shards:
            whole = only(batch)
            runs = self._reducer.assignment.runs(min(len(whole), shards), step)
            return cut_own_shards(whole, shards, whole.part(runs, self._reducer.rank, shards))
        if self.in_hand is not None and self._draws is not None:
            self._draws.end(self.in_hand)
        part = self.in_hand or functools.partial(self._part, step=step)
        return cut_batch(batch, shards, part, self._batch_dim)

    def compare_ends(self, source: Source, call: str) -> None:
        """Compare what an epoch was with the other processes."""
        facts = source.facts_at_end()
        if facts:
            agree(self._peers, facts, "the data", call)

    def by_the_first(self, function: Callable[[], Path]) -> Path:
        """Call `function` in the first process only; return its result everywhere.

        Raises:
            Exception: the error of the call; in the other processes SaveError.
        """
        error: Exception | None = None
        answer = {"path": "", "error": ""}
        if self.is_first:
            try:
                answer["path"] = str(function())
            except Exception as caught:
                error = caught
                answer["error"] = text_of(caught) or type(caught).__name__
        message = json.dumps(answer).encode()
        answer = json.loads(self._peers.gather(message, Exchange("save", "the checkpoint"))[0])
        if error is not None:
            raise error
        if answer["error"]:
            raise SaveError(answer["error"])
        return Path(answer["path"])

    def measured_of_all(
        self, own: Sequence[Mapping[str, Any]], names: Sequence[str], outputs: str
    ) -> list[dict[str, Any]]:
        """Return the metrics of all shards from those of this process's shards."""
        counted = [name for name in names if name != outputs]
        pairs = [[shard[name] for name in counted] for shard in own]
        numbers = [[[float(total), float(count)] for total, count in row] for row in pairs]
        values = torch.tensor(numbers, dtype=torch.float64).reshape(len(own), len(counted), 2)
        exchange = Exchange("evaluate", "the metrics of a batch")
        messages = self._peers.gather(save({"pairs": values}), exchange)
        rows = [row for message in messages for row in load(message)["pairs"].tolist()]
        measured = [
            {name: tuple(pair) for name, pair in zip(counted, row, strict=True)} for row in rows
        ]
        if outputs in names:
            sent = self.outputs_of_all([shard[outputs] for shard in own], "evaluate")
            for one, more in zip(measured, sent, strict=True):
                one[outputs] = more
        return measured

    def outputs_of_all(self, own: Sequence[Batch], call: str = "predict") -> list[Batch]:
        """Return the outputs of all shards from those of this process's shards."""
        exchange = Exchange(call, "the outputs of a batch")
        messages = self._peers.gather(save(pack_outputs(own)), exchange)
        return [output for message in messages for output in unpack_outputs(load(message))]

    def digest_of(self, batch: Batch, *, is_due: bool) -> int:
        """Return the digest of a batch if it is compared in this step."""
        is_whole = self.in_hand is None
        if not is_whole and not is_due and self._is_first_own and not self._was_handed(batch):
            self._is_first_own = False
            return own_digest(batch)
        if not (is_due or (is_whole and self._is_first_batch)):
            return NO_DIGEST
        self._is_first_batch &= not is_whole
        return batch_digest(batch, is_whole=is_whole)

    def _was_handed(self, batch: Batch) -> bool:
        """Whether a batch has a tensor of the one that `batches` has yielded last."""
        ours, theirs = ({*map(id, optree.tree_leaves(one))} for one in (batch, self._handed))
        return not ours.isdisjoint(theirs)

    def refuse_other_results(
        self,
        step: int,
        cut: Cut,
        seed: Callable[[int], int],
        compute: Compute,
        attributes: Mapping[str, str],
    ) -> None:
        """Compute one shard in every process, and compare the bits, unless rounding differs."""
        if not self.differences:
            self.note(f"comparing a shard of step {step}")
            refuse_other_results(self._peers, step, cut, seed, compute, attributes)

    def cut_compared(
        self, batch: Batch, shards: int, step: int, place: tuple[str, int], before: Part | None
    ) -> Cut:
        """Compare a batch to evaluate with that of the other processes, and cut this one's part.

        A batch that comes from no loop of the call itself, but inside a loop over an epoch, is a
        whole one if it is not of that loop, and all processes have the same.
        """
        call, number = place
        given = self.in_hand
        own = [batch_digest(batch, is_whole=is_whole) for is_whole in (True, given is None)]
        messages = self._peers.gather(json.dumps(own).encode(), Exchange(call, "a batch"))
        wholes, digests = zip(*map(json.loads, messages), strict=True)
        named = dict(enumerate(digests))
        refuse_other_batches(named, self._peers, f"batch {number} of {call}")
        if given is before and not self._was_handed(batch) and len({*wholes}) == 1:
            self.in_hand = None
        try:
            return self.cut(batch, shards, step)
        finally:
            self.in_hand = given

    def compare_states(self, state: State, step: int, call: str) -> None:
        """Compare the state after `step` steps with that of the other processes.

        Processes that round differently take the state of the first one.
        """
        tensors, settings = state()
        rounded = {
            name: value
            for name, value in tensors.items()
            if self.differences
            and isinstance(value, torch.Tensor)
            and (value.is_floating_point() or value.is_complex())
        }
        digests = {
            name: tensor_digest(value) for name, value in tensors.items() if name not in rounded
        }
        refuse_divergence(self._peers, digests, settings, step, call)
        if self.differences:
            follow_the_first(self._peers, rounded, step, call)

    def note(self, doing: str) -> None:
        """Publish what this process is doing, for processes that wait for it."""
        self._reducer.note(doing)

    def ask_to_stop(self) -> None:
        """Stop all processes before the same step."""
        super().ask_to_stop()
        self._reducer.stop_asked = True

    def should_stop(self, steps_done: int) -> bool:
        """Return whether step `steps_done` must not be taken."""
        # A process that learns of it has at most so many further steps in flight.
        seen = self._reducer.stop_seen
        return seen is not None and steps_done >= seen + self._reducer.in_flight

    def _part(self, examples: int, step: int) -> Part:
        bounds = shard_bounds(examples, self._shards)
        runs = self._reducer.assignment.runs(min(examples, self._shards), step)
        return Part(examples, bounds, runs, self._reducer.rank, self._batch_dim)
