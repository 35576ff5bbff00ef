"""The shards of a step side by side, adding values up on their way through it.

What a layer needs of the whole batch (batch normalisation's statistics), no shard knows alone. So
all of a step's shards are under way at once, each in a thread of its own with a replica of its own.
A device lets one of its shards run at a time, as ever; where one has to wait for the others, the
device goes on with the next.
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
"""A stretch of time in which a device ran a shard: its number, began_s, ended_s."""


class Lockstep:
    """The step's shards, and what they have brought so far.

    Args:
        shards: how many there are with examples: numbers 0 to `shards` − 1.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._brought: dict[Hashable, dict[int, Any]] = {}
        self._sums: dict[Hashable, Any] = {}
        self._waiting = 0
        self._through = 0
        self._stopped = False
        self._change = threading.Condition()

    def stop(self) -> None:
        """Let every shard end where it would wait next."""
        with self._change:
            self._stopped = True
            self._change.notify_all()

    def _bring(self, shard: int, key: Hashable, value: T, add: Callable[[T, T], T]) -> bool:
        """Note a shard's value; say whether it was the last one, and the sum is there."""
        with self._change:
            brought = self._brought.setdefault(key, {})
            brought[shard] = value
            if len(brought) < self._shards:
                self._waiting += 1
                self._refuse_standstill()
                return False
            del self._brought[key]
            self._sums[key] = tree_sum([brought[shard] for shard in range(self._shards)], add)
            self._waiting -= self._shards - 1
            self._change.notify_all()
            return True

    def _wait_for(self, key: Hashable) -> None:
        with self._change:
            self._change.wait_for(lambda: key in self._sums or self._stopped)

    def _sum_of(self, key: Hashable) -> Any:
        if self._stopped:
            raise _StoppedError
        return self._sums[key]

    def _leave(self) -> None:
        """A shard is through the step."""
        with self._change:
            self._through += 1
            self._refuse_standstill()

    def _refuse_standstill(self) -> None:
        """Refuse a model whose shards don't all come to the same places."""
        if self._waiting and self._waiting + self._through == self._shards and not self._stopped:
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
    """One shard on its way, in the thread that computes it.

    Args:
        lockstep: all shards.
        number: which one this is.
        device_is_free: held while a shard of the device runs.
        note: told of every turn, when it is over.
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

        Raises:
            what `function` raises; then the step is stopped for all.
            ModelError: others wait for what this shard has not brought.
        """
        self._begin_turn()
        try:
            result = function()
            self._lockstep._leave()
        except _StoppedError:
            return None
        except BaseException:
            self._lockstep.stop()
            raise
        finally:
            self._end_turn()
        return result

    def sum_over_shards(self, key: Hashable, value: T, add: Callable[[T, T], T]) -> T:
        """Return the canonical sum of what all shards bring under `key`; wait for it.

        Args:
            key: the same for all, and new in this step.
            value: of this shard; not to be changed any more.
            add: `add(left, right)`, which leaves both as they are.
        """
        if not self._lockstep._bring(self._number, key, value, add):
            self._end_turn()
            try:
                self._lockstep._wait_for(key)
            finally:
                self._begin_turn()
        total: T = self._lockstep._sum_of(key)
        return total

    def _begin_turn(self) -> None:
        self._device_is_free.acquire()
        self._began_s = time.perf_counter()

    def _end_turn(self) -> None:
        self._note((self._number, self._began_s, time.perf_counter()))
        self._device_is_free.release()


class _StoppedError(EvenstepError):
    """The step was stopped while a shard was under way."""


def _listed(shards: dict[int, Any]) -> str:
    return f"shard{'s' * (len(shards) > 1)} {', '.join(map(str, sorted(shards)))}"
