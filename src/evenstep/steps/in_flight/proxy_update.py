"""The end of a step in flight: its update, made through a proxy while the user's thread goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from evenstep.errors import InputError
from evenstep.replicas import (
    OptimizerProxy,
    Replicas,
    is_left,
    note_left,
)
from evenstep.shard.partial_sum import PartialSum
from evenstep.steps.in_flight.outside import OutsideValues
from evenstep.steps.step import Step
from evenstep.steps.update import Hook, Update


class ProxyUpdate(Update):
    """Ends steps in flight through a proxy of the optimizer, while the user's thread goes on.

    Args:
        proxy: applies updates with the hyper-parameters in force when a step was submitted.
        outside: what the user's code reads outside of the model.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        replicas: Replicas,
        before_update: Hook | None,
        after_update: Hook | None,
        clip_norm: float | None,
        proxy: OptimizerProxy,
        outside: OutsideValues,
    ) -> None:
        super().__init__(optimizer, replicas, before_update, after_update, clip_norm)
        self._proxy = proxy
        self._outside = outside
        self._left: Sequence[torch.Tensor | None] = ()
        self._showing = threading.Lock()
        self.record = self._record

    @property
    def is_outdated(self) -> bool:
        """Whether the user has changed the optimizer since `follow_user`, for steps in flight."""
        return not self._proxy.fits

    def follow_user(self) -> None:
        """Follow what the user did to the model's layers and to the optimizer."""
        super().follow_user()
        self._proxy.mark() if self._proxy.fits else self._proxy.renew()

    def _record(self) -> Sequence[Any]:
        """Return the hyper-parameters that have changed since the last step.

        Raises:
            InputError: the user has registered a hook on the optimizer's step.
        """
        for kind in ("pre", "post"):
            for hook in getattr(self._optimizer, f"_optimizer_step_{kind}_hooks").values():
                if getattr(hook, "__self__", None) is not self:
                    raise InputError(
                        f"the optimizer has a hook of register_step_{kind}_hook, but the update of "
                        f"a step in flight is made by a copy of the optimizer, while the model's "
                        f"parameters show no gradients: use Experiment(clip_norm=...) or "
                        f"before_update=..., or after_update=..., or max_in_flight=1"
                    )
        return self._proxy.record()

    def note_outside(self) -> None:
        """Note what the user's code reads outside of the model."""
        self._outside.note()

    def refuse_changed_outside(self) -> None:
        """Refuse a change of what steps in flight read outside of the model."""
        self._outside.refuse_changed()

    def give_back(self) -> None:
        """Leave the optimizer to the user; no step is in flight."""
        self._proxy.give_back()

    def renew(self) -> None:
        """Follow the user's optimizer again, after steps that were not taken."""
        self._proxy.renew()

    def _close_buffers(self, root: PartialSum) -> None:
        self._replicas.refuse_written()
        self._proxy.refuse_written()
        super()._close_buffers(root)

    def _close(self, step: Step) -> None:
        try:
            super()._close(step)
        finally:
            self._replicas.update_copies()
            self._proxy.mark()

    def _ready(self, step: Step, count: float, root: PartialSum) -> None:
        """Keep the gradients where the user's `zero_grad` can't reach them until the update.

        Only a `before_update` needs them in the user's parameters, while it runs.
        """
        home = self._replicas.home.parameters
        if self._before_update:
            with self._showing:
                before = [parameter.grad for parameter in home]
                try:
                    self.install(step, count, root)
                    root.gradients = [parameter.grad for parameter in home]
                finally:  # they would count as the user's own
                    self._show(before)
        else:
            self._divide(step, root, count)
            if self._clip_norm is not None:
                self._clip(step, [SimpleNamespace(grad=one) for one in root.gradients])

    def _update(self, step: Step, count: float, root: PartialSum) -> None:
        self._ready(step, count, root)
        home = self._replicas.home.parameters
        self._proxy.step(step.settings, dict(zip(home, root.gradients, strict=True)))
        self._leave(root.gradients)

    def _call(self, hook: Hook, name: str) -> None:
        # Not a context manager of contextlib: it replaces an exception that refuses attributes.
        refuse_changes = self._replicas.watched_attributes(name)
        super()._call(hook, name)
        refuse_changes()

    def _leave(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Keep gradients until no step is in flight.

        Until then `.grad` is the user's: `zero_grad` may free it in the user's thread at any time,
        and a lane that reads it meanwhile would crash.
        """
        self._left = gradients

    def drop_left(self) -> None:
        """Free the gradients of the last step, where a later one in flight needs the memory."""
        self._left = ()

    def show_left(self) -> None:
        """Show the user the gradients of the last step; no step is in flight.

        Gradients that the user has set meanwhile stay, for the next step to refuse or to add.
        """
        home = self._replicas.home.parameters
        if self._left and all(one.grad is None or is_left(one.grad) for one in home):
            self._show(self._left)
            note_left(home)
        self._left = ()

    def refuse_own_gradients(self) -> None:
        """Refuse gradients that the user has set with a step in flight."""
        with self._showing:
            super().refuse_own_gradients()
