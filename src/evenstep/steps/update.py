"""The end of a step: the mean loss, the buffers, the mean gradients, the optimizer's update."""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import nn

from evenstep.collectives import tree_sum
from evenstep.errors import ContractError, ModelError, NonFiniteLossError
from evenstep.replicas import (
    Replicas,
    check_followed,
    hookable,
    note_left,
    refuse_gradients_in_flight,
)
from evenstep.shard.forward_backward import Leaf
from evenstep.shard.loss import Number
from evenstep.shard.partial_sum import (
    PartialSum,
    Tensors,
    add_gradients,
    closing_buffers,
    divide_gradients,
    receive,
)
from evenstep.steps.outputs import join_step_outputs
from evenstep.steps.step import Step

Hook: TypeAlias = Callable[[nn.Module], object]
"""The user's `before_update` or `after_update`: called with the module, in the update."""


class Update:
    """Ends a step with the user's optimizer, while the user's thread waits.

    Args:
        optimizer: the user's optimizer.
        replicas: the replicas of the model.
        before_update: called between the division of the gradients and the update.
        after_update: called after the update, before other memories get the new parameters.
        clip_norm: the largest norm of the gradients; None for no limit, infinity to measure it.

    Attributes:
        may_step_elsewhere: whether the user may step the optimizer, since the last step has left
            its gradients to the user.
        record: returns the hyper-parameters that a step is submitted with, where the user may
            change them before its update.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        replicas: Replicas,
        before_update: Hook | None,
        after_update: Hook | None,
        clip_norm: float | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._replicas = replicas
        self._before_update = before_update
        self._after_update = after_update
        self._clip_norm = clip_norm
        self.may_step_elsewhere = False
        self.record: Callable[[], Sequence[Any]] = tuple
        self._is_stepping = False
        self._stepped = hookable(optimizer)
        self._known = {*replicas.home.parameters}  # those that the optimizer was made for

    def __call__(self, step: Step, leaves: Sequence[Leaf | None], root: PartialSum) -> None:
        """Settle the loss and update the model; called in a lane."""
        step.loss, count = settle(step, leaves)
        if root.gradients and root.gradients[0] is None:
            refuse_no_gradient(step, root, self._replicas.home.parameters)
        self._close_buffers(root)
        with _no_compiling():
            self._update(step, count, root)
        step.is_taken = True
        self._close()

    def leave_gradients(self, step: Step, leaves: Sequence[Leaf | None], root: PartialSum) -> None:
        """End a step without an update: the user's parameters get the mean gradients.

        They get the memory layout of their parameters, as in torch's own backward pass.
        """
        step.loss, count = settle(step, leaves)
        if root.gradients and root.gradients[0] is None:
            refuse_no_gradient(step, root, self._replicas.home.parameters)
        self._close_buffers(root)
        self._divide(step, root, count)
        home = self._replicas.home.parameters
        root.gradients = [*map(_laid_out_like, home, root.gradients)]
        self._leave(root.gradients)
        step.is_taken = True
        self._replicas.mark_written()

    def install(self, step: Step, count: float, root: PartialSum) -> None:
        """Put the mean gradients into the user's parameters, call the user's hook, and clip."""
        self._divide(step, root, count)
        self._show(root.gradients)
        if self._before_update:
            self._call(self._before_update, "before_update")
        if self._clip_norm is not None:
            self._clip(step, self._replicas.home.parameters)

    @property
    def is_outdated(self) -> bool:
        """Whether the user has changed the optimizer since `follow_user`, for steps in flight."""
        return False

    def follow_user(self) -> None:
        """Follow what the user did to the model's layers and to the optimizer."""
        replicas = self._replicas
        if replicas.were_rebuilt:
            check_followed(replicas.home.module, self._optimizer, self._known)
            self._known = {*replicas.home.parameters}
            replicas.were_rebuilt = False

    def update_copies(self) -> None:
        """Copy the updated parameters to every memory that holds copies of them; in a lane."""
        self._replicas.update_copies()

    def give_back(self) -> None:
        """Leave the optimizer to the user; no step is in flight."""

    def show_left(self) -> None:
        """Show the user the gradients of the last step; no step is in flight."""

    def note_outside(self) -> None:
        """Note what the user's code reads outside of the model, for steps in flight."""

    def refuse_changed_outside(self) -> None:
        """Refuse a change of what steps in flight read outside of the model."""

    def refuse_own_gradients(self) -> None:
        """Refuse gradients that the user has set with a step in flight."""
        refuse_gradients_in_flight(self._replicas.home)

    def renew(self) -> None:
        """Follow the user's optimizer again, after steps that were not taken."""

    def minimise(self, closure: Callable[[], float]) -> None:
        """Update with an optimizer that evaluates the batch by `closure`."""
        self._step(closure)

    def close_minimised(self, root: PartialSum) -> None:
        """End such an update: called in a lane with the sum of the last evaluation.

        Buffers that no shard has changed keep what the user's hook has written.
        """
        self._receive(root)
        self._replicas.write_buffers(closing_buffers(root))
        note_left(self._replicas.home.parameters)
        self._close()

    def refuse_foreign_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Refuse an update of the user's own: a hook that the optimizer calls before each step.

        After `Trainer.backward` it is the user's to make, and by a closure that calls it.

        Returns:
            None, or arguments with a closure that must call `Trainer.backward`.
        """
        may_step = self._is_stepping or self.may_step_elsewhere
        if may_step or all(optimizer is not one for one in self._stepped):
            return None
        closure = options.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            raise _foreign_step_error(self._optimizer)

        def checked() -> Any:
            loss = closure()
            if not self.may_step_elsewhere:
                raise _foreign_step_error(self._optimizer)
            return loss

        return args[:1], {**options, "closure": checked}

    _ready = install

    def _update(self, step: Step, count: float, root: PartialSum) -> None:
        self._ready(step, count, root)
        self._step()
        note_left(self._replicas.home.parameters)

    def _step(self, *closure: Callable[[], float]) -> None:
        self._is_stepping = True
        try:
            self._optimizer.step(*closure)
        finally:
            self._is_stepping = False

    def _close_buffers(self, root: PartialSum) -> None:
        """Write the closing buffers, before the user's hooks and the optimizer may write them."""
        if root.buffers or self._replicas.forward_writes or self._replicas.computed:
            self._receive(root)
            self._replicas.close_step(closing_buffers(root))

    def _close(self) -> None:
        """Call the user's hook; the next step copies the parameters to every other memory.

        Until then the user may write to them, even past the version counters.
        """
        try:
            if self._after_update:
                self._call(self._after_update, "after_update")
        finally:
            self._replicas.mark_written()

    def _call(self, hook: Hook, name: str) -> None:
        hook(self._replicas.home.module)
        self._replicas.adopt_buffers()

    def _divide(self, step: Step, root: PartialSum, count: float) -> None:
        """Make mean gradients of the sums; add those of the user's own."""
        if root.fence is not None:
            self._receive(root)
        divide_gradients(root.gradients, count)
        if self._replicas.hooked:
            self._call_hooks(root)
        if step.own:
            self._add_own([*step.own], root)

    def _add_own(self, own: Tensors, root: PartialSum) -> None:
        root.gradients = add_gradients(root.gradients, own)

    def _clip(self, step: Step, holders: Sequence[Any]) -> None:
        """Scale the gradients of `holders` (each has one as `grad`) to the largest norm."""
        assert self._clip_norm is not None
        if self._clip_norm == math.inf:
            step.outputs = {"grad_norm": _norm_of(holders), **step.outputs}
            return
        refuse_other_norm(step)
        norm = nn.utils.clip_grad_norm_(holders, self._clip_norm)
        step.outputs = {**step.outputs, "grad_norm": float(norm)}

    def _receive(self, root: PartialSum) -> None:
        if root.fence is not None:
            receive(root, self._replicas.home.device)

    def _call_hooks(self, root: PartialSum) -> None:
        """Pass the mean gradients through the hooks of the user's parameters, as torch does.

        Raises:
            ModelError: a hook returns something else than a gradient.
        """
        home = self._replicas.home
        for number, name in self._replicas.hooked:
            gradient = root.gradients[number]
            for hook in [*(home.parameters[number]._backward_hooks or {}).values()]:
                if gradient is None:
                    break
                with torch.no_grad():
                    changed = hook(gradient)
                if changed is not None:
                    _check_gradient(changed, gradient, name)
                    gradient = changed
            root.gradients[number] = gradient

    def _show(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._replicas.home.parameters, gradients, strict=True):
            parameter.grad = gradient

    _leave = _show


def is_in_a_trainer(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an open trainer steps this optimizer."""
    hooks = optimizer._optimizer_step_pre_hooks.values()
    return any(getattr(hook, "__func__", None) is Update.refuse_foreign_step for hook in hooks)


def settle(step: Step, leaves: Sequence[Leaf | None]) -> tuple[float, float]:
    """Return the step's mean loss, and what its gradients are still to be divided by.

    Each shard's backward pass has divided by the examples of the batch already.

    Raises:
        NonFiniteLossError: a shard's loss or count is NaN or infinite, or nothing counts.
        ModelError: the counts add up to less than 0.
    """
    totals, counts = zip(*(leaf[:2] if leaf else (None, None) for leaf in leaves), strict=True)
    count = sum_floats(counts)
    if not 0 < count < math.inf:
        _refuse_count(step, leaves, count)
    mean = sum_floats(totals) / count
    if not math.isfinite(mean):
        fix = (
            "Try a lower learning rate, clip gradients in before_update, or look at those examples"
        )
        values = [None if total is None else float(total) for total in totals]
        _refuse_non_finite(step, "loss", values, fix)
    if len(leaves[0] or ()) > 2:
        part = step.part
        examples = [hi - lo for lo, hi in part.bounds]
        step.outputs = join_step_outputs(leaves, examples, [*dict.fromkeys((part.dim, 0))])
    return mean, count / step.attempt.cut.divisor


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


def _refuse_count(step: Step, leaves: Sequence[Leaf | None], count: float) -> NoReturn:
    """Raise the error for counts that nothing can be divided by."""
    counts = [None if leaf is None else float(leaf[1]) for leaf in leaves]
    fix = "The objective must return a finite number that its total can be divided by"
    _refuse_non_finite(step, "count", counts, fix)
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


def _refuse_non_finite(step: Step, what: str, values: Sequence[float | None], fix: str) -> None:
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
            "the objective returns an output 'grad_norm', a name that clip_norm= uses: give it "
            "another name"
        )


def _norm_of(holders: Sequence[Any]) -> float:
    """Return the norm of the gradients of `holders`, sparse ones too."""
    gradients = [one.grad for one in holders if one.grad is not None]
    dense = [one.coalesce().values() if one.is_sparse else one for one in gradients]
    return float(nn.utils.get_total_norm(dense))


def _check_gradient(changed: object, gradient: torch.Tensor, name: str) -> None:
    if not isinstance(changed, torch.Tensor) or changed.shape != gradient.shape:
        shape = f"of shape {tuple(changed.shape)}" if isinstance(changed, torch.Tensor) else changed
        raise ModelError(
            f"a hook of the parameter {name} returned a value {shape}: a gradient of shape "
            f"{tuple(gradient.shape)} is needed, or None to leave it as it is"
        )


def _foreign_step_error(optimizer: torch.optim.Optimizer) -> ContractError:
    return ContractError(
        f"{type(optimizer).__name__}.step() was called while a trainer is open, but "
        f"Trainer.step has updated the parameters already: remove loss.backward() and "
        f"optimizer.step() from the loop (a scheduler's step() stays), or call "
        f"trainer.backward(...) instead of trainer.step(...)"
    )


def _laid_out_like(parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient with the strides of its parameter."""
    is_like = gradient is None or gradient.is_sparse or gradient.stride() == parameter.stride()
    if gradient is None or is_like:
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


@contextlib.contextmanager
def kept_gradients(model: nn.Module, *, accumulate: bool) -> Iterator[None]:
    """Put gradients back after an error; after success, add them to the new ones if asked to."""
    before = {parameter: parameter.grad for parameter in model.parameters()}
    try:
        yield
    except BaseException:
        for parameter, gradient in before.items():
            parameter.grad = gradient
        raise
    for parameter, gradient in before.items() if accumulate else ():
        if gradient is not None and parameter.grad is not None:
            gradient = gradient + parameter.grad
        parameter.grad = parameter.grad if gradient is None else gradient


def sum_floats(values: Sequence[Number | None]) -> float:
    """Return the canonical sum of shards' numbers (None for an empty shard), in float64."""
    total = tree_sum([None if value is None else float(value) for value in values], operator.add)
    assert total is not None
    return total


def _no_compiling() -> contextlib.AbstractContextManager[object]:
    """Return a context in which no other thread runs `torch.compile`.

    While one thread compiles, optimizers in all threads take the arithmetic that can be compiled
    (Adam corrects its bias in another order): torch's flag for it belongs to the process.
    """
    dynamo = sys.modules.get("torch._dynamo.convert_frame")  # present once something was compiled
    return contextlib.nullcontext() if dynamo is None else dynamo.compile_lock
