"""Gradients that `Trainer.backward` has left to the user, and that no optimizer has used yet.

A checkpoint holds no gradients. So one that is saved before the user's update, as by a handler of a
signal, is of the state before those backward passes: a resumed training computes them again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from evenstep.errors import InputError
from evenstep.replicas import Replicas
from evenstep.replicas.replica import sum_of_bits
from evenstep.steps.step import Position, Progress, Step


class LeftGradients:
    """Knows where the training was before the gradients that no optimizer has used yet.

    Args:
        replicas: the replicas of the model.
        progress: how far the training is.

    Attributes:
        before: position, buffers and bits of the parameters before the first of the backward
            passes whose gradients no optimizer has used; None if there are none.
    """

    def __init__(self, replicas: Replicas, progress: Progress) -> None:
        self._replicas = replicas
        self._progress = progress
        self.before: tuple[Position, Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None

    @contextlib.contextmanager
    def whole(self, step: Step, *, accumulate: bool, is_alone: bool) -> Iterator[None]:
        """Inside `with`, take a step that leaves gradients: all of it, or nothing after an error.

        A step that other processes have taken, too, stays after an error.

        Args:
            step: a step that has not begun.
            accumulate: whether its gradients are added to those that the parameters have.
            is_alone: whether there are no other processes.
        """
        before, bits = self.before, self._bits()
        had: dict[torch.Tensor, torch.Tensor | None] = {
            one: one.grad for one in self._replicas.home.module.parameters()
        }
        try:
            if before is None or not _are_same(before[2], bits):  # the first since an update
                self.before = step.position, self._buffers(), bits
            yield
            _add(had if accumulate else {})
        except BaseException:
            if step.is_taken and not is_alone:
                _add(had if accumulate else {})
                raise
            if step.is_taken:
                self._replicas.restore_opening()
            self._progress.go_back(step)
            self.before = before
            for parameter, gradient in had.items():
                parameter.grad = gradient
            raise

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Inside `with`, position and buffers are those before the backward passes.

        Raises:
            InputError: an epoch has ended between them.
        """
        before, progress = self.before, self._progress
        if before is None or not _are_same(before[2], self._bits()):
            yield
            return
        position, opening, _ = before
        if progress.drawn.epoch > position.cursor.epoch and progress.drawn.step:
            raise InputError(
                f"save was called between trainer.backward in epoch {position.cursor.epoch} and "
                f"the optimizer's step in the next epoch: a checkpoint holds no gradients, so "
                f"save after optimizer.step()"
            )
        later, buffers = progress.position, self._buffers()
        try:
            progress.position = position
            self._replicas.write_buffers(opening)
            yield
        finally:
            progress.position = later
            self._replicas.write_buffers(buffers)

    def _buffers(self) -> list[torch.Tensor]:
        return [buffer.detach().clone() for buffer in self._replicas.home.buffers]

    def _bits(self) -> list[torch.Tensor]:
        held = self._replicas.home.parameters
        return [sum_of_bits(one) for one in held if one.layout is torch.strided]


def _add(gradients: Mapping[torch.Tensor, torch.Tensor | None]) -> None:
    """Add gradients to those of their parameters."""
    given = [(one, gradient) for one, gradient in gradients.items() if gradient is not None]
    sums = [gradient if one.grad is None else gradient + one.grad for one, gradient in given]
    for (one, _), total in zip(given, sums, strict=True):
        one.grad = total


def _are_same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))
