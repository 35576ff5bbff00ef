"""Steps that fail: what is refused, what an error has left, and whether another attempt helps."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from evenstep.arithmetic import is_portable_here
from evenstep.distributed.step_report import AgainError
from evenstep.errors import (
    BatchError,
    ContractError,
    InputError,
    ModelError,
    NonFiniteLossError,
    was_entered,
)
from evenstep.limits import Arithmetic
from evenstep.shard.forward_backward import Leaf
from evenstep.shard.partial_sum import AccumulatedTwiceError, PartialSum
from evenstep.steps.executors import IndependentExecutor
from evenstep.steps.step import Step


class Recovery:
    """Decides whether a failed step is attempted again.

    Another attempt helps after two failures: a gradient that a backward pass added to twice, and a
    device that failed or hung; in this process or in another one.

    Args:
        executor: computes the shards; `can_retry` changes its settings before another attempt.
    """

    def __init__(self, executor: IndependentExecutor) -> None:
        self._executor = executor

    def can_retry(self, step: Step, error: BaseException) -> bool:
        """Return whether another attempt can succeed, after preparing the executor for it."""
        if isinstance(error, AccumulatedTwiceError):
            self._executor.adds_once = False
            return True
        if type(error) in (BatchError, InputError):  # a batch or a model was written to
            return False
        if isinstance(error, AgainError):
            return True
        if step.attempt.ending.committed:
            return False
        lost = self._executor.lost
        lost.give_up_failed(step.attempt.ending.errors)
        return lost.can_go_on(error, f"step {step.number}")


def refuse_no_gradient(step: Step, root: PartialSum, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse a step in which no parameter has got a gradient, as torch's `backward` does."""
    if any(gradient is not None for gradient in root.gradients) or any(root.present):
        return
    why = "the loss does not depend on them (look for detach(), item() or torch.no_grad())"
    if not any(parameter.requires_grad for parameter in parameters):
        why = "none requires a gradient: call requires_grad_() on those that are to be trained"
    raise ModelError(
        f"no parameter of the model has got a gradient in step {step.number}, since {why}; the "
        f"step was not taken"
    )


def refuse_count(step: Step, leaves: Sequence[Leaf | None], count: float) -> NoReturn:
    """Raise the error for counts that nothing can be divided by."""
    counts = [None if leaf is None else float(leaf[1]) for leaf in leaves]
    fix = "The objective must return a finite number that its total can be divided by"
    refuse_non_finite(step, "count", counts, fix)
    if count < 0:
        raise ModelError(
            f"the counts add up to {count} in step {step.number}: at least 0 is needed, because a "
            f"negative count would maximise the total. The objective must return (total, count), "
            f"such as a sum over examples and their number"
        )
    raise NonFiniteLossError(
        f"step {step.number} counts nothing (is every target ignored?), so its mean loss is 0/0: "
        f"the step was not taken; leave out such batches"
    )


def refuse_non_finite(step: Step, what: str, values: Sequence[float | None], fix: str) -> None:
    """Refuse a step in which a value of a shard is NaN or infinite."""
    for shard, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            lo, hi = step.part.bounds[shard]
            place = step.position.cursor
            raise NonFiniteLossError(
                f"the {what} of shard {shard} (examples {lo} to {hi - 1} of the batch) in step "
                f"{step.number} (epoch {place.epoch}, batch {place.step}) is {value}: the step was "
                f"not taken. {fix}"
            )


def refuse_other_norm(step: Step) -> None:
    """Refuse an objective that returns an output with the name of the gradients' norm."""
    if "grad_norm" in step.outputs:
        raise ModelError(
            "the objective returns an output 'grad_norm', a name that clip_norm uses: give it "
            "a different name"
        )


def check_gradient(changed: object, gradient: torch.Tensor, name: str) -> None:
    """Refuse what a hook of the parameter `name` has returned, if it is no gradient of it."""
    if not isinstance(changed, torch.Tensor) or changed.shape != gradient.shape:
        shape = f"of shape {tuple(changed.shape)}" if isinstance(changed, torch.Tensor) else changed
        raise ModelError(
            f"a hook of the parameter {name} returned a value {shape}: a gradient of shape "
            f"{tuple(gradient.shape)} is needed, or None to leave it as it is"
        )


def half_step_text(number: int) -> str:
    """Return what to say of a step that failed within its update."""
    return (
        f"step {number} failed within its update, when some of the parameters may have been "
        f"written, so the training state is between two steps: load the last checkpoint"
    )


def is_inside_step(optimizer: torch.optim.Optimizer, error: BaseException) -> bool:
    """Return whether an error was raised in an optimizer's own step, not in a hook around it."""

    def is_own(function: Callable[..., Any]) -> bool:
        module: str = getattr(function, "__globals__", {}).get("__name__", "")
        return module.partition(".")[0] != "torch"  # which wraps a step, for hooks and schedulers

    step = inspect.unwrap(optimizer.step, stop=is_own)
    code = getattr(step, "__code__", None)
    return code is None or was_entered(code, error)


def refuse_other_arithmetic(arithmetic: Arithmetic) -> None:
    """Refuse a step of the optimizer, after `Trainer.backward`, in other than the experiment's.

    Raises:
        ContractError: the training is portable, and the calling thread does not compute so.
    """
    if arithmetic == "portable" and not is_portable_here():
        raise ContractError(
            'the experiment has arithmetic="portable", but optimizer.step() was called outside of '
            "it: write `with evenstep.portable(): optimizer.step()`"
        )


def foreign_step_error(optimizer: torch.optim.Optimizer) -> ContractError:
    """Return the error for a step of the user's optimizer that the trainer does not make."""
    return ContractError(
        f"{type(optimizer).__name__}.step() was called while a trainer is open, but "
        f"Trainer.step has updated the parameters already: remove loss.backward() and "
        f"optimizer.step() from the loop (a scheduler's step() stays), or call "
        f"trainer.backward(...) instead of trainer.step(...)"
    )
