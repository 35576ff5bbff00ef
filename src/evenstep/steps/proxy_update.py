"""The end of a step in flight: its update, made through a proxy while the user's thread goes on."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch

from evenstep.replicas import OptimizerProxy, Replicas
from evenstep.shard.partial_sum import PartialSum
from evenstep.steps.step import Step
from evenstep.steps.update import Hook, Update


class ProxyUpdate(Update):
    """Ends steps in flight through a proxy of the optimizer, while the user's thread goes on.

    Args:
        proxy: applies updates with the hyper-parameters in force when a step was submitted.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        replicas: Replicas,
        before_update: Hook | None,
        after_update: Hook | None,
        clip_norm: float | None,
        proxy: OptimizerProxy,
    ) -> None:
        super().__init__(optimizer, replicas, before_update, after_update, clip_norm)
        self._proxy = proxy
        self._shown: Sequence[torch.Tensor | None] = ()
        self.record = proxy.record

    @property
    def is_outdated(self) -> bool:
        """Whether the user has changed the optimizer since `follow_user`, for steps in flight."""
        return not self._proxy.fits

    def follow_user(self) -> None:
        """Follow what the user did to the model's layers and to the optimizer."""
        super().follow_user()
        self._proxy.mark() if self._proxy.fits else self._proxy.renew()

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
            self.install(step, count, root)
            root.gradients = [parameter.grad for parameter in home]
            self._show([None] * len(home))
        else:
            self._divide(root, count)
            if self._clip_norm is not None:
                self._clip(step, [SimpleNamespace(grad=one) for one in root.gradients])

    def _update(self, step: Step, count: float, root: PartialSum) -> None:
        self._ready(step, count, root)
        home = self._replicas.home.parameters
        self._proxy.step(step.settings, dict(zip(home, root.gradients, strict=True)))
        self._show(root.gradients)

    def _call(self, hook: Hook, name: str) -> None:
        # Not a context manager of contextlib: it replaces an exception that refuses attributes.
        refuse_changes = self._replicas.watched_attributes(name)
        super()._call(hook, name)
        refuse_changes()

    def _show(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Put gradients into the user's parameters, and keep them alive.

        Otherwise `zero_grad` in the user's thread would free them; torch lets other threads run
        meanwhile, and a lane that reads the same `.grad` would crash.
        """
        super()._show(gradients)
        self._shown = gradients
