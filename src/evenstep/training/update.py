"""The end of a step: from the shards' losses and the sum of their gradients to the update."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from evenstep.errors import NonFiniteLossError
from evenstep.replicas import OptimizerTwin, Replicas, broadcast
from evenstep.shard.forward_backward import (
    Leaf,
    NodeSum,
    closing_buffers,
    divide_gradients,
    receive,
)
from evenstep.training.executor import sum_floats
from evenstep.training.step import StepRun


class Update:
    """Ends steps: settles the loss, divides, lets the user's hook see, updates, closes buffers."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        replicas: Replicas,
        before_update: Callable[[nn.Module], object] | None,
        twin: OptimizerTwin | None,
    ) -> None:
        self._optimizer = optimizer
        self._replicas = replicas
        self._before_update = before_update
        self._twin = twin
        self._shown: Sequence[torch.Tensor | None] = ()

    def __call__(self, run: StepRun, leaves: Sequence[Leaf | None], root: NodeSum) -> None:
        """Take the step; called in a lane."""
        run.loss, count = settle(run, leaves)
        with _nothing_compiles():
            if self._twin is None:
                self.install(count, root)
                self._optimizer.step()
            else:
                self._replicas.refuse_written()
                self._step_twin(self._twin, run, count, root)
        self.close(root)

    def _step_twin(self, twin: OptimizerTwin, run: StepRun, count: float, root: NodeSum) -> None:
        """Update with gradients that the front end's `zero_grad` can't reach meanwhile.

        But a `before_update` looks for them, and they lie open while it runs.
        """
        if self._before_update:
            self.install(count, root)
            root.gradients = [parameter.grad for parameter in self._replicas.home.parameters]
            self._show([None] * len(root.gradients))
        else:
            self._divide(root, count)
        home = self._replicas.home.parameters
        twin.step(run.settings, dict(zip(home, root.gradients, strict=True)))
        self._show(root.gradients)

    def install(self, count: float, root: NodeSum) -> None:
        """Put the mean gradients where the optimizer looks, and let the user's hook see them."""
        self._divide(root, count)
        self._show(root.gradients)
        if self._before_update:
            self._before_update(self._replicas.home.module)

    def _divide(self, root: NodeSum, count: float) -> None:
        receive(root, self._replicas.home.device)
        divide_gradients(root.gradients, count)

    def _show(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Let the user's parameters have `gradients`; with steps in flight keep these alive.

        Else the front end's `zero_grad` would free them; torch lets other threads run meanwhile,
        and a lane that got at the same `.grad` would crash.
        """
        for parameter, gradient in zip(self._replicas.home.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._shown = gradients if self._twin else ()

    def close(self, root: NodeSum) -> None:
        """Write the closing buffers, and bring every memory's parameters up to date."""
        self._replicas.close_step(closing_buffers(root))
        self.bring_copies_up_to_date()

    def bring_copies_up_to_date(self) -> None:
        """Give every memory that holds copies the home's parameters."""
        for replica in self._replicas.copies:
            broadcast(self._replicas.home, replica)
        self._replicas.mark_synchronised()


class Closure:
    """What an optimizer calls that evaluates the batch as often as it likes (LBFGS).

    It writes parameters between evaluations, and wants gradients that can be viewed as flat.

    Args:
        evaluate: computes the batch's shards once, ends with the function it is given, and waits.
        update: puts gradients where the optimizer looks.
        replicas: whose buffers each evaluation starts from anew.

    Attributes:
        first: the first evaluation.
        root: the sum over the shards of the last one.
    """

    def __init__(
        self,
        evaluate: Callable[[Callable[..., None]], StepRun],
        update: Update,
        replicas: Replicas,
    ) -> None:
        self._evaluate = evaluate
        self._update = update
        self._replicas = replicas
        self.first: StepRun | None = None
        self.root: NodeSum | None = None

    def __call__(self) -> float:
        """Evaluate once; return the loss."""
        run = self._evaluate(self._install)
        self.first = self.first or run
        return run.loss

    def _install(self, run: StepRun, leaves: Sequence[Leaf | None], root: NodeSum) -> None:
        run.loss, count = settle(run, leaves)
        root.gradients = [g if g is None else g.contiguous() for g in root.gradients]
        self._update.install(count, root)
        self._replicas.restore_opening()
        self.root = root


def _nothing_compiles() -> AbstractContextManager[object]:
    """Return what holds off `torch.compile` in other threads.

    While one compiles, optimizers in all of them take the arithmetic that can be compiled (Adam
    corrects its bias in another order): torch's flag for it belongs to the process.
    """
    dynamo = sys.modules.get("torch._dynamo.convert_frame")  # there once something was compiled
    return nullcontext() if dynamo is None else dynamo.compile_lock


def settle(run: StepRun, leaves: Sequence[Leaf | None]) -> tuple[float, float]:
    """Return the step's mean loss, and the count that its gradients are to be divided by.

    Raises:
        NonFiniteLossError: a shard's loss is not a number, or nothing counts.
    """
    for shard, leaf in enumerate(leaves):
        if leaf is not None and not math.isfinite(float(leaf[0])):
            lo, hi = run.attempt.cut.bounds[shard]
            raise NonFiniteLossError(
                f"the loss of shard {shard} (examples {lo} to {hi - 1} of the batch) in step "
                f"{run.number} (epoch {run.cursor.epoch}, batch {run.cursor.step}) is "
                f"{float(leaf[0])}: the step was not taken. Try a lower learning rate, clip "
                f"gradients in before_update, or look at those examples"
            )
    count = sum_floats([leaf and leaf[1] for leaf in leaves])
    if count == 0:
        raise NonFiniteLossError(
            f"step {run.number} counts nothing (is every target ignored?), so its mean "
            f"loss is 0/0: the step was not taken"
        )
    return sum_floats([leaf and leaf[0] for leaf in leaves]) / count, count
