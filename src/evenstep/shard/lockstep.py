"""Runs all shards of a step side by side, so that they can exchange values over the whole batch.

A shard alone doesn't know what some layers and losses need: batch normalisation's statistics, the
other examples of a contrastive loss (`all_gather`). So all of a step's shards are in progress at
once, each in a thread of its own with a replica of its own. A device still runs one of its shards
at a time; when that one has to wait for shards elsewhere, the device switches to its next one.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch.autograd.function import once_differentiable

from evenstep.collectives import tree_sum
from evenstep.devices import Device
from evenstep.devices.forward_mode import refuse_inside_a_level
from evenstep.engine import streams
from evenstep.errors import ContractError, EvenstepError

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

    def bring(self, shard: int, key: Hashable, value: T) -> list[T] | None:
        """Note a shard's value; return all values by shard if it is the last one, which adds up."""
        with self._change:
            brought = self._brought.setdefault(key, {})
            brought[shard] = value
            if len(brought) < self._shards:
                self._waiting += 1
                self._refuse_deadlock()
                return None
            del self._brought[key]
            self._waiting -= self._shards - 1
            return [brought[shard] for shard in range(self._shards)]

    def show(self, key: Hashable, total: object) -> None:
        """Give the shards that wait for `key` the sum."""
        with self._change:
            self._sums[key] = total
            self._change.notify_all()

    def wait_for(self, key: Hashable) -> None:
        """Wait until the sum for `key` is there, or the step was stopped."""
        with self._change:
            self._change.wait_for(lambda: key in self._sums or self._stopped)

    def sum_of(self, key: Hashable) -> Any:
        """Return the sum for `key`; raise if the step was stopped."""
        if self._stopped:
            raise StoppedError
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
            raise ContractError(
                f"the shards of the batch wait for each other at different places: {places}, of "
                f"{self._shards} shards. Every shard must make the same calls of "
                f"evenstep.all_gather, and with batch_norm='sync' go through the same BatchNorm "
                f"layers: use batch_norm='shard' for a model that branches"
            )


class DeviceTurns:
    """Lets one of a device's shards run at a time.

    Args:
        note: called with every turn, at its end.
        device: the device.
    """

    def __init__(self, note: Callable[[Turn], object], device: Device) -> None:
        self._note = note
        self.device = device
        self._is_free = threading.Lock()
        self._began_s: float | None = None

    @property
    def working_s(self) -> float | None:
        """The seconds since the turn of the running shard began; None while no shard runs."""
        began_s = self._began_s
        return None if began_s is None else time.perf_counter() - began_s

    def begin(self) -> None:
        """Wait until the device is free, and begin a turn."""
        self._is_free.acquire()
        self._began_s = time.perf_counter()

    def end(self, shard: int) -> None:
        """End the turn of a shard."""
        assert self._began_s is not None
        self._note((shard, self._began_s, time.perf_counter()))
        self._began_s = None
        self._is_free.release()


class ShardInStep:
    """One shard of a step, in the thread that computes it.

    Args:
        lockstep: the step's shards.
        number: this shard's number, also an attribute.
        turns: the turns of the shard's device.
    """

    def __init__(self, lockstep: Lockstep, number: int, turns: DeviceTurns) -> None:
        self._lockstep = lockstep
        self.number = number
        self._turns = turns
        self._gathers = 0

    def run(self, function: Callable[[], T]) -> T | None:
        """Return `function()`, called when the device is free; None if the step was stopped.

        An exception from `function` stops the step for all shards.

        Raises:
            ContractError: other shards wait for a value that this shard has not brought.
        """
        self._turns.begin()
        try:
            result = function()
            self._lockstep.shard_done()
        except StoppedError:
            return None
        except BaseException:
            self._lockstep.stop()
            raise
        finally:
            self._turns.end(self.number)
        return result

    def sum_over_shards(self, key: Hashable, value: T, add: Callable[[T, T], T]) -> T:
        """Wait until all shards have brought a value for `key`, and return their canonical sum.

        Args:
            key: the same for all shards, and new in this step.
            value: this shard's value; it must not be changed afterwards.
            add: `add(left, right)`; it must not change its arguments.

        Raises:
            ContractError: the caller is inside a level of forward-mode AD, which others may want.
        """
        refuse_inside_a_level("evenstep.all_gather or BatchNorm over the whole batch")
        device = self._turns.device
        brought = self._lockstep.bring(self.number, key, streams.given_from(device, value))
        if brought is not None:
            total = tree_sum([streams.received(one, device) for one in brought], add)
            self._lockstep.show(key, streams.given_from(device, total))
        else:
            self._turns.end(self.number)
            try:
                self._lockstep.wait_for(key)
            finally:
                self._turns.begin()
        found: T = streams.received(self._lockstep.sum_of(key), device)
        return found

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all shards, in the order of the shards (see `all_gather`)."""
        if rows.ndim == 0:
            raise ContractError(
                "evenstep.all_gather got a single number: give a tensor with a row for each example"
            )
        self._gathers += 1
        gathered: torch.Tensor = _Gather.apply(  # type: ignore[no-untyped-call]
            rows, self, f"call {self._gathers} of all_gather"
        )
        return gathered


class Gathers(Protocol):
    """Has the rows of all shards for `all_gather`."""

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all shards, given one shard's."""


class Alone:
    """Refuses to gather, where a shard is computed by itself on an accelerator to check it.

    With its own rows only, an index of other shards' rows would be outside of the tensor. On a CPU
    that is an error like others; on an accelerator nothing could be computed afterwards.
    """

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Raise AloneError."""
        raise AloneError("evenstep.all_gather has no other shards in a check on an accelerator")


shard_here: ContextVar[Gathers | Literal["apart"] | None] = ContextVar("shard", default=None)
"""The shard that the calling thread computes: "apart" if it can't meet the batch's other shards;
None outside of steps, and for a shard that is the whole batch."""


def all_gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows of `tensor` of all shards of the step, in the order of the batch.

    Call it in an objective, a metric or a model's `forward`, where a loss needs the whole batch. In
    a contrastive loss, for example, each shard compares its own examples with those of all shards.

        def objective(model, images, texts, index):
            image, text = model(images, texts)
            logits = image @ evenstep.all_gather(text).T
            return F.cross_entropy(logits, index, reduction="sum"), len(index)

        trainer.step(images, texts, torch.arange(len(images)))

    Value and gradient are those of the whole batch: in the backward pass, the gradients of all
    shards with respect to the result are summed in the canonical tree, and each shard gets its own
    rows of the sum. The trainer needs `side_by_side=True` (or `batch_norm="sync"`), and all shards
    of a step must make the same calls. A batch with one shard, and code outside of a trainer, gets
    `tensor` itself.

    Args:
        tensor: of shape (rows, ...); the number of rows may differ between shards.

    Returns:
        A tensor of shape (rows of all shards, ...).

    Raises:
        ContractError: the shards are not computed side by side, or their tensors differ in dtype or
            in the shape of a row.
    """
    if torch.compiler.is_compiling():
        raise ContractError("evenstep.all_gather can't be compiled")
    shard = shard_here.get()
    if shard is None:
        return tensor
    if isinstance(shard, str):
        raise ContractError(
            "evenstep.all_gather needs the other shards of the batch, which are not computed side "
            "by side: use Layout(side_by_side=True)"
        )
    return shard.gather(tensor)


class _Gather(torch.autograd.Function):
    """Concatenates the rows of all shards; sums the gradients of all shards, and cuts them."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, shard: ShardInStep, place: str) -> torch.Tensor:
        own = (rows.detach().clone(),)  # the shard may write to its rows while others still read
        brought = shard.sum_over_shards(place, own, operator.add)
        _refuse_unlike(brought, place)
        first = sum(map(len, brought[: shard.number]))
        ctx.given = shard, place, slice(first, first + len(rows))
        return torch.cat(brought)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        shard, place, own = ctx.given
        total = shard.sum_over_shards(f"the backward pass of {place}", gradients[0], torch.add)
        return total[own].clone(), None, None


def _refuse_unlike(brought: Sequence[torch.Tensor], place: str) -> None:
    """Refuse rows that can't be concatenated, or that would be cast."""
    kinds = [(tuple(rows.shape[1:]), rows.dtype) for rows in brought]
    for shard, kind in enumerate(kinds):
        if kind != kinds[0]:
            ours, theirs = (
                f"rows of shape {shape} and {dtype}" for shape, dtype in (kinds[0], kind)
            )
            raise ContractError(
                f"{place}: shard 0 brought {ours}, shard {shard} {theirs}: all shards must bring "
                f"rows of one shape and dtype"
            )


class AloneError(EvenstepError):
    """A shard that is checked by itself needs others."""


class StoppedError(EvenstepError):
    """The step was stopped while a shard was in progress."""


def _listed(shards: dict[int, Any]) -> str:
    return f"shard{'s' * (len(shards) > 1)} {', '.join(map(str, sorted(shards)))}"
