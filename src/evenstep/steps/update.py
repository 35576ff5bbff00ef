"""The end of a step: the mean loss, the buffers, the mean gradients, the optimizer's update."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from evenstep.arithmetic import within
from evenstep.collectives import tree_sum
from evenstep.devices.addresses import align_gradients, aligned
from evenstep.errors import ClosedError, add_note
from evenstep.limits import Arithmetic
from evenstep.private_torch.compilers import lock_of_compiler
from evenstep.private_torch.optimizers import post_hooks, pre_hooks
from evenstep.private_torch.tensors import version_of
from evenstep.replicas import (
    Replicas,
    check_followed,
    hookable,
    note_left,
    refuse_gradients_in_flight,
)
from evenstep.replicas.replica import is_left
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
from evenstep.steps.failures import (
    check_gradient,
    foreign_step_error,
    half_step_text,
    is_inside_step,
    refuse_count,
    refuse_no_gradient,
    refuse_non_finite,
    refuse_other_arithmetic,
    refuse_other_norm,
)
from evenstep.steps.outputs import join_step_outputs
from evenstep.steps.step import Step

logger = logging.getLogger("evenstep")

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
        arithmetic: that of the experiment, which the lanes compute in.
        may_step_elsewhere: whether the user may step the optimizer, since the last step has left
            its gradients to the user.
        record: returns the hyper-parameters that a step is submitted with, where the user may
            change them before its update.
        half_step: the number of a step that failed within its update, when some of the parameters
            may have been written; None so far. Nothing goes on from there.
    """

    half_step: int | None = None
    _is_half = False  # where processes are owners: some may have updated

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
        self.arithmetic: Arithmetic = "torch"
        self.record: Callable[[], Sequence[Any]] = tuple
        self._is_stepping = self._is_made = self._has_said_it = False
        self._used: list[tuple[torch.Tensor, int]] = []  # the gradients of the last update
        self._compiling = lock_of_compiler()  # None before torch has imported its compiler
        self._stepped = hookable(optimizer)
        self._known = {*replicas.home.parameters}  # those that the optimizer was made for

    def __call__(self, step: Step, leaves: Sequence[Leaf | None], root: PartialSum) -> None:
        """Settle the loss and update the model; called in a lane."""
        step.loss, count = settle(step, leaves)
        if root.gradients and root.gradients[0] is None:
            refuse_no_gradient(step, root, self._replicas.home.parameters)
        self._close_buffers(root)
        self._is_made = False
        try:
            self._compiling = self._compiling or lock_of_compiler()
            with self._compiling or contextlib.nullcontext():
                self._update(step, count, root)
            step.is_taken = True
        except BaseException as error:
            self._judge(step, error)
            raise
        finally:
            self._is_stepping = False
            if step.is_taken:
                self._close(step)

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
        if self._before_update:
            align_gradients(self._replicas.home.parameters)

    @property
    def is_outdated(self) -> bool:
        """Whether the user has changed the optimizer since `follow_user`, for steps in flight."""
        return False

    def refuse_half_step(self) -> None:
        """Refuse to use or save a training state that lies between two steps.

        Raises:
            ClosedError: a step failed within its update.
        """
        if self.half_step is not None:
            raise ClosedError(half_step_text(self.half_step))

    def follow_user(self) -> None:
        """Follow what the user did to the model's layers and to the optimizer.

        Raises:
            ClosedError: a step failed within its update.
        """
        if self.half_step is not None:
            self.refuse_half_step()
        for gradient, version in self._used:
            if version_of(gradient) != version and not is_left(gradient):
                self._say_written_late()
                break
        self._used = []
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

    def drop_left(self) -> None:
        """Free the gradients of the last step, where a later one in flight needs the memory."""

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
        self._is_stepping = True
        try:
            with within(self.arithmetic)():
                self._optimizer.step(closure)
        finally:
            self._is_stepping = False
            note_left(self._replicas.home.parameters)

    def close_minimised(self, step: Step, root: PartialSum) -> None:
        """End such an update: called in a lane with the sum of the last evaluation.

        Buffers that no shard has changed keep what the user's hook has written.
        """
        self._receive(root)
        self._replicas.write_buffers(closing_buffers(root))
        self._close(step)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside `with`, the optimizer calls `refuse_foreign_step`, and says when it has stepped.

        It says so before it calls the user's own hooks, which may fail.
        """
        hook = self._optimizer.register_state_dict_pre_hook(lambda _: self.refuse_half_step())
        try:
            for one in self._stepped:
                made = one.register_step_post_hook(self._note_made)
                post_hooks(one).move_to_end(made.id, last=False)
                one.register_step_pre_hook(self.refuse_foreign_step)
            yield
        finally:
            hook.remove()
            self.unwatch()

    def unwatch(self) -> None:
        """Remove its hooks of optimizers' steps, also those that an exception from outside left."""
        self._used = []
        for one in self._stepped:
            for hooks in (pre_hooks(one), post_hooks(one)):
                for number, hook in [*hooks.items()]:
                    if getattr(hook, "__self__", None) is self:
                        hooks.pop(number, None)

    def _note_made(self, *_: object) -> None:
        self._is_made = True

    def refuse_foreign_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Refuse an update of the user's own: a hook that the optimizer calls before each step.

        After `Trainer.backward` it is the user's to make, and by a closure that calls it.

        Returns:
            None, or arguments with a closure that must call `Trainer.backward`.
        """
        if self._is_stepping or all(optimizer is not one for one in self._stepped):
            return None
        if self.may_step_elsewhere:
            refuse_other_arithmetic(self.arithmetic)
            return None
        closure = options.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            raise foreign_step_error(self._optimizer)

        def checked() -> Any:
            loss = closure()
            if not self.may_step_elsewhere:
                raise foreign_step_error(self._optimizer)
            return loss

        return args[:1], {**options, "closure": checked}

    _ready = install

    def _update(self, step: Step, count: float, root: PartialSum) -> None:
        try:
            self._ready(step, count, root)
            self._step()
        finally:
            self._used = note_left(self._replicas.home.parameters)

    def _say_written_late(self) -> None:
        """Log once that the user has written to gradients after the update that they were for."""
        if not self._has_said_it:
            self._has_said_it = True
            logger.warning(
                "gradients were written to after trainer.step (by clip_grad_norm_?), which has no "
                "effect, since the update was made before: to clip, give "
                "Experiment(clip_norm=...); for anything else, write to them in before_update"
            )

    def _step(self) -> None:
        self._is_stepping = True
        self._optimizer.step()

    def _close_buffers(self, root: PartialSum) -> None:
        """Write the closing buffers, before the user's hooks and the optimizer may write them."""
        if root.buffers or self._replicas.forward_writes or self._replicas.computed.found:
            self._receive(root)
            self._replicas.close_step(closing_buffers(root))

    def _judge(self, step: Step, error: BaseException) -> None:
        """Say of a step that failed within its update whether it is taken, or half of it.

        It is taken if a hook has failed that the optimizer calls after its step. Of an optimizer
        that has failed itself nobody knows what it has written, maybe past the version counters.
        """
        is_inside = self._is_half or is_inside_step(self._optimizer, error)
        if self._is_made and not is_inside:
            step.is_taken = True
            step.note_taken(error)
        elif is_inside or self._replicas.were_written_since_open:
            self.half_step = step.number
            add_note(error, half_step_text(step.number))

    def _close(self, step: Step) -> None:
        """Call the user's hook; the next step copies the parameters to every other memory.

        Until then the user may write to them, even past the version counters.
        """
        try:
            if self._after_update:
                self._call(self._after_update, "after_update")
        except BaseException as error:
            step.note_taken(error)
            raise
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
            self._call_hooks(step, root)
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

    def _call_hooks(self, step: Step, root: PartialSum) -> None:
        """Pass the mean gradients through the hooks of the user's parameters, as torch does.

        Raises:
            ModelError: a hook returns something else than a gradient.
        """
        for number, name in self._replicas.hooked:
            gradient = root.gradients[number]
            for hook in step.hooks.get(number, ()):
                if gradient is None:
                    break
                with torch.no_grad():
                    changed = hook(gradient)
                if changed is not None:
                    check_gradient(changed, gradient, name)
                    gradient = aligned(changed)
            root.gradients[number] = gradient

    def _show(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._replicas.home.parameters, gradients, strict=True):
            parameter.grad = gradient

    _leave = _show


def is_in_a_trainer(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an open trainer steps this optimizer."""
    hooks = pre_hooks(optimizer).values()
    return any(getattr(hook, "__func__", None) is Update.refuse_foreign_step for hook in hooks)


def settle(step: Step, leaves: Sequence[Leaf | None]) -> tuple[float, float]:
    """Return the step's mean loss, and what its gradients are still to be divided by.

    Each shard's backward pass has divided by the examples of the batch already.

    Raises:
        NonFiniteLossError: a shard's loss or count is NaN or infinite, or nothing counts.
        ModelError: the counts add up to less than 0.
    """
    totals, counts = zip(*[leaf[:2] if leaf else (None, None) for leaf in leaves], strict=True)
    count = sum_floats(counts)
    if not 0 < count < math.inf:
        refuse_count(step, leaves, count)
    mean = sum_floats(totals) / count
    if not math.isfinite(mean):
        fix = (
            "Try a lower learning rate, clip gradients in before_update, or look at those examples"
        )
        values = [None if total is None else float(total) for total in totals]
        refuse_non_finite(step, "loss", values, fix)
    if len(leaves[0] or ()) > 2:
        part = step.part
        examples = [hi - lo for lo, hi in part.bounds]
        step.outputs = join_step_outputs(leaves, examples, [*dict.fromkeys((part.dim, 0))])
    return mean, count / step.attempt.cut.divisor


def _norm_of(holders: Sequence[Any]) -> float:
    """Return the norm of the gradients of `holders`, sparse ones too."""
    gradients = [one.grad for one in holders if one.grad is not None]
    dense = [one.coalesce().values() if one.is_sparse else one for one in gradients]
    return float(nn.utils.get_total_norm(dense))


def _laid_out_like(parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient with the strides of its parameter."""
    is_like = gradient is None or gradient.is_sparse or gradient.stride() == parameter.stride()
    if gradient is None or is_like:
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def sum_floats(values: Sequence[Number | None]) -> float:
    """Return the canonical sum of shards' numbers (None for an empty shard), in float64."""
    total = tree_sum([None if value is None else float(value) for value in values], operator.add)
    assert total is not None
    return total
