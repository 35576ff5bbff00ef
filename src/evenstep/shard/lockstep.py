"""Runs all shards of a step side by side, so that a layer can sum values over the whole batch.

A shard alone doesn't know what such a layer needs (batch normalisation's statistics). So all of a
step's shards are in progress at once, each in a thread of its own with a replica of its own. A
device still runs one of its shards at a time; when that one has to wait for shards elsewhere, the
device switches to its next one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from evenstep.collectives import tree_sum
from evenstep.errors import EvenstepError, ModelError

T = TypeVar("T")

Turn = tuple[int, float, float]
"""A stretch of time in which a device ran a shard: the shard's number, began_s, ended_s."""


class Lockstep:
    """Adds up the values that the shards of one step bring.

    Args:
        shards: the number of shards with examples; they are numbered from 0.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._brought: dict[Hashable, dict[int, Any]] = {}
        self._sums: dict[Hashable, Any] = {}
        self._waiting = 0
        self._done = 0
        self._stopped = False
        self._change = threading.Condition()

    def stop(self) -> None:
        """Make every shard end at its next sum."""
        with self._change:
            self._stopped = True
            self._change.notify_all()

    def bring(self, shard: int, key: Hashable, value: T, add: Callable[[T, T], T]) -> bool:
        """Note a shard's value; return whether it was the last one, so that the sum is there."""
        with self._change:
            brought = self._brought.setdefault(key, {})
            brought[shard] = value
            if len(brought) < self._shards:
                self._waiting += 1
                self._refuse_deadlock()
                return False
            del self._brought[key]
            self._sums[key] = tree_sum([brought[shard] for shard in range(self._shards)], add)
            self._waiting -= self._shards - 1
            self._change.notify_all()
            return True

    def wait_for(self, key: Hashable) -> None:
        """Wait until the sum for `key` is there, or the step was stopped."""
        with self._change:
            self._change.wait_for(lambda: key in self._sums or self._stopped)

    def sum_of(self, key: Hashable) -> Any:
        """Return the sum for `key`; raise if the step was stopped."""
        if self._stopped:
            raise _StoppedError
        return self._sums[key]

    def shard_done(self) -> None:
        """Note that a shard has finished the step."""
        with self._change:
            self._done += 1
            self._refuse_deadlock()

    def _refuse_deadlock(self) -> None:
        """Refuse a model whose shards don't all come to the same sums."""
        if self._waiting and self._waiting + self._done == self._shards and not self._stopped:
            places = "; ".join(
                f"{key} was reached by {_listed(brought)}"
                for key, brought in sorted(self._brought.items(), key=lambda item: str(item[0]))
            )
            raise ModelError(
                f"the shards of the batch wait for each other at different places: {places}, of "
                f"{self._shards} shards. With batch_norm='sync' every shard must go through the "
                f"same BatchNorm layers: use batch_norm='shard' for a model that branches"
            )


class ShardInStep:
    """One shard of a step, in the thread that computes it.

    Args:
        lockstep: the step's shards.
        number: this shard's number.
        device_is_free: held while a shard of the device runs.
        note: called with every turn, at its end.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        number: int,
        device_is_free: threading.Lock,
        note: Callable[[Turn], object],
    ) -> None:
        self._lockstep = lockstep
        self._number = number
        self._device_is_free = device_is_free
        self._note = note
        self._began_s = 0.0

    def run(self, function: Callable[[], T]) -> T | None:
        """Return `function()`, called when the device is free; None if the step was stopped.

        An exception from `function` stops the step for all shards.

        Raises:
            ModelError: other shards wait for a value that this shard has not brought.
        """
        self._begin_turn()
        try:
            result = function()
            self._lockstep.shard_done()
        except _StoppedError:
            return None
        except BaseException:
            self._lockstep.stop()
            raise
        finally:
            self._end_turn()
        return result

    def sum_over_shards(self, key: Hashable, value: T, add: Callable[[T, T], T]) -> T:
        """Wait until all shards have brought a value for `key`, and return their canonical sum.

        Args:
            key: the same for all shards, and new in this step.
            value: this shard's value; it must not be changed afterwards.
            add: `add(left, right)`; it must not change its arguments.
        """
        if not self._lockstep.bring(self._number, key, value, add):
            self._end_turn()
            try:
                self._lockstep.wait_for(key)
            finally:
                self._begin_turn()
        total: T = self._lockstep.sum_of(key)
        return total

    def _begin_turn(self) -> None:
        self._device_is_free.acquire()
        self._began_s = time.perf_counter()

    def _end_turn(self) -> None:
        self._note((self._number, self._began_s, time.perf_counter()))
        self._device_is_free.release()


class _StoppedError(EvenstepError):
    """The step was stopped while a shard was in progress."""


def _listed(shards: dict[int, Any]) -> str:
    return f"shard{'s' * (len(shards) > 1)} {', '.join(map(str, sorted(shards)))}"
