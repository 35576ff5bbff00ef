"""The processes that train together: one alone, or several that a launcher has started.

A group answers what a process must know besides its own devices: which shards are its own, which
part of a batch to load, how a step's partial sums become one, and when all processes stop.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load, save

from evenstep.batch import Batch, Part, count_examples, cut_batch, shard_bounds
from evenstep.batch.cut import Cut, cut_whole_batch
from evenstep.batch.own_shards import Shards, cut_own_shards, only
from evenstep.checkpoint.fingerprint import tensor_digest
from evenstep.data import Cursor
from evenstep.data.adapters.sources import Source
from evenstep.devices import Device, arithmetic_facts, known_results
from evenstep.devices.discovery import WITHIN_ROUNDING
from evenstep.distributed import (
    Exchange,
    LauncherWatch,
    Peers,
    agree,
    differences,
    follow_the_first,
    join,
    refuse_divergence,
    show_reported_errors_in_one_line,
    was_launched,
)
from evenstep.distributed.step_report import NO_DIGEST, batch_digest, refuse_other_batches
from evenstep.errors import InputError, SaveError, text_of
from evenstep.experiment import Experiment
from evenstep.replicas import Replicas
from evenstep.steps.outputs import pack_outputs, unpack_outputs
from evenstep.steps.reducer import LocalReducer, ProcessReducer

logger = logging.getLogger("evenstep")

State: TypeAlias = "Callable[[], tuple[Mapping[str, Any], Mapping[str, str]]]"
"""Returns what must be the same in all processes: tensors by name, and settings by name."""

FINGERPRINT = "the fingerprint of model and optimizer"
OPEN = "the `with` that opens the trainer"


class Group:
    """A process that trains alone.

    Args:
        batch_dim: the dimension that the examples of a batch lie along.

    Attributes:
        reducer: turns the partial sums of a step into one.
        is_alone: whether there are no other processes.
        is_first: whether this process is the one that writes files.
        differences: what makes the processes round differently, in words; empty if nothing does.
        cut: `cut(batch, shards, step)` cuts this process's part of the batch of a step.
    """

    is_alone = True
    is_first = True
    differences = ""

    def __init__(self, batch_dim: int = 0) -> None:
        self.reducer = LocalReducer()
        self.cut: Callable[[Batch, int, int], Cut] = functools.partial(
            cut_whole_batch, dim=batch_dim
        )
        self._batch_dim = batch_dim
        self._stop_asked = False

    def alone(self) -> Group:
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
        self, own: Sequence[Mapping[str, Any]], names: Sequence[str], with_states: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return the metrics of all shards from those of this process's shards.

        Args:
            own: for each shard, what its metrics returned.
            names: the metrics that returned (total, count).
            with_states: those that returned states.
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

    def refuse_other_batches(self, batch: Batch, call: str, number: int) -> None:
        """Compare a batch to evaluate with that of the other processes.

        Args:
            batch: the batch.
            call: the trainer's method that it is for.
            number: its place among the batches of the call.
        """

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

    def should_stop(self, steps_done: int, max_in_flight: int) -> bool:
        """Return whether step `steps_done` must not be taken."""
        return self._stop_asked


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
        self._given: Part | None = None  # of the batch that `batches` has yielded last
        self._is_first_batch = True
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
        place = {"the next batch": [cursor.epoch, cursor.step]}
        agree(self._peers, {**source.facts(cursor), **place}, "the data", call)
        if whole or not source.fetches_parts:
            yield from self._whole_batches(source, cursor, is_wanted=whole)
            return
        fetched: dict[int, Part] = {}
        upcoming = cursor.step

        def part(number: int, examples: int) -> Part:
            fetched[number] = self._part(examples, steps_done() + number - upcoming)
            return fetched[number]

        outer = own = self._given  # of a loop around this one, such as an epoch that evaluates
        try:
            for number, batch in enumerate(source.epoch(cursor, part), cursor.step):
                upcoming = number + 1
                self._given = own = fetched.pop(number)
                yield batch
        finally:
            if self._given is own:
                self._given = outer

    def _whole_batches(self, source: Source, cursor: Cursor, *, is_wanted: bool) -> Iterator[Batch]:
        if self.is_first and not is_wanted and source not in self._said_whole:
            logger.warning(
                "every process loads whole batches of the %s: %s", source.name, source.whole_because
            )
        self._said_whole = [source]
        outer = self._given  # of a loop around this one
        try:
            for batch in source.epoch(cursor):
                self._given = None
                yield batch
        finally:
            self._given = outer

    def _cut(self, batch: Batch, shards: int, step: int) -> Cut:
        """Cut this process's part of the batch of step `step` into shards."""
        if batch and type(batch[0]) is Shards:
            whole = only(batch)
            runs = self._reducer.assignment.runs(min(len(whole), shards), step)
            return cut_own_shards(whole, shards, whole.part(runs, self._reducer.rank, shards))
        part = self._given or self._part(count_examples(batch, self._batch_dim), step)
        return cut_batch(batch, shards, part)

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
        self, own: Sequence[Mapping[str, Any]], names: Sequence[str], with_states: Sequence[str]
    ) -> list[dict[str, Any]]:
        """Return the metrics of all shards from those of this process's shards."""
        pairs = [[shard[name] for name in names] for shard in own]
        numbers = [[[float(total), float(count)] for total, count in row] for row in pairs]
        values = torch.tensor(numbers, dtype=torch.float64).reshape(len(own), len(names), 2)
        exchange = Exchange("evaluate", "the metrics of a batch")
        messages = self._peers.gather(save({"pairs": values}), exchange)
        rows = [row for message in messages for row in load(message)["pairs"].tolist()]
        measured = [
            {name: tuple(pair) for name, pair in zip(names, row, strict=True)} for row in rows
        ]
        if with_states:
            states = [{name: shard[name] for name in with_states} for shard in own]
            sent = self.outputs_of_all(states, "evaluate")
            measured = [{**one, **more} for one, more in zip(measured, sent, strict=True)]
        return measured

    def outputs_of_all(self, own: Sequence[Batch], call: str = "predict") -> list[Batch]:
        """Return the outputs of all shards from those of this process's shards."""
        exchange = Exchange(call, "the outputs of a batch")
        messages = self._peers.gather(save(pack_outputs(own)), exchange)
        return [output for message in messages for output in unpack_outputs(load(message))]

    def digest_of(self, batch: Batch, *, is_due: bool) -> int:
        """Return the digest of a batch if it is compared in this step."""
        is_whole = self._given is None
        if not (is_due or (is_whole and self._is_first_batch)):
            return NO_DIGEST
        self._is_first_batch &= not is_whole
        return batch_digest(batch, is_whole=is_whole)

    def refuse_other_batches(self, batch: Batch, call: str, number: int) -> None:
        """Compare a batch to evaluate with that of the other processes."""
        digest = batch_digest(batch, is_whole=self._given is None)
        messages = self._peers.gather(str(digest).encode(), Exchange(call, "a batch"))
        digests = dict(enumerate(map(int, messages)))
        refuse_other_batches(digests, self._peers, f"batch {number} of {call}")

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

    def should_stop(self, steps_done: int, max_in_flight: int) -> bool:
        """Return whether step `steps_done` must not be taken."""
        # The first process to learn of it has at most `max_in_flight` further steps in flight.
        seen = self._reducer.stop_seen
        return seen is not None and steps_done >= seen + max_in_flight

    def _part(self, examples: int, step: int) -> Part:
        bounds = shard_bounds(examples, self._shards)
        runs = self._reducer.assignment.runs(min(examples, self._shards), step)
        return Part(examples, bounds, runs, self._reducer.rank, self._batch_dim)


@contextlib.contextmanager
def joined(
    replicas: Replicas,
    experiment: Experiment,
    timeout_s: float,
    facts: Callable[[], Mapping[str, object]],
    own_speed: Callable[[], float],
    in_flight: int,
    *,
    allow_rounding: bool,
    make_reducer: type[ProcessReducer] = ProcessReducer,
) -> Iterator[Group]:
    """Find the other processes, if there are any, and yield the group of all of them.

    Args:
        replicas: the replicas of the model in this process.
        experiment: the choices that the result depends on.
        timeout_s: the most seconds that any wait for another process may take.
        facts: returns what must be the same everywhere, by name.
        own_speed: returns how many shards a second this process computes; 0 while unknown.
        in_flight: how many steps may be submitted and not finished.
        allow_rounding: whether the processes may round differently.
        make_reducer: the class that reduces steps over several processes.

    Raises:
        PeerError: the processes are not all there within the time limit.
        InputError: they are about to train different things, or would round differently.
    """
    peers = join(timeout_s) if was_launched() else None
    if peers is None or peers.size == 1:
        yield Group(experiment.batch_dim)
        return
    show_reported_errors_in_one_line()
    with peers.status_board, LauncherWatch(), contextlib.closing(peers.transport):
        devices = [replica.device for replica in replicas.all]
        different = _other_rounding(peers, devices, experiment.autocast_dtype)
        if different and not allow_rounding:
            raise InputError(
                f"the processes would round differently: {different}. Use the same processors, "
                f"libraries and settings for all, or give allow_rounding=True: then "
                f"{WITHIN_ROUNDING}"
            )
        same = dict(facts())
        if different:
            del same[FINGERPRINT]  # states are equal within rounding
        agree(peers, same, "what is trained", OPEN)
        own = json.dumps([len(replicas.all), replicas.on_cpus]).encode()
        named = peers.gather(own, Exchange(OPEN, "its number of devices"))
        counts, on_cpus = zip(*map(json.loads, named), strict=True)
        reducer = make_reducer(peers, replicas, counts, own_speed, in_flight, on_cpus=all(on_cpus))
        with contextlib.closing(reducer):
            yield LinkedGroup(reducer, experiment.shards, experiment.batch_dim, different)


def _other_rounding(peers: Peers, devices: Sequence[Device], dtype: torch.dtype | None) -> str:
    """Return what makes the processes round differently, in words; empty if nothing does.

    Known computations are compared if all else is equal.
    """
    facts = Exchange(OPEN, "its processor, libraries and settings")
    results = Exchange(OPEN, "the results of known computations")
    return differences(peers, arithmetic_facts(devices), facts) or differences(
        peers, known_results(devices, dtype), results
    )
