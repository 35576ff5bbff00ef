"""What the processes that train together must agree on, and when they compare it."""

from __future__ import annotations

from torch import nn, optim

from evenstep.checkpoint import fingerprint as fingerprints
from evenstep.engine.interrupts import interruptible
from evenstep.replicas import layer_settings, optimizer_settings
from evenstep.shard.loss import Loss
from evenstep.steps.group import FINGERPRINT, Group


class Agreement:
    """Compares what processes train, and the states that they are in.

    Args:
        model: the user's model.
        optimizer: the user's optimizer.
        loss: the loss that the trainer was given.
        every: the number of steps between two comparisons of states.
    """

    def __init__(
        self, model: nn.Module, optimizer: optim.Optimizer, loss: Loss | None, every: int
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loss = loss
        self._every = every
        self._began_at = self._compared_at = 0  # steps done

    def begin(self, steps_done: int) -> None:
        """Note that the processes open their trainers, whose states are equal."""
        self._began_at = self._compared_at = steps_done

    def is_due(self, steps_done: int) -> bool:
        """Whether what a step is given is compared before it."""
        return steps_done % self._every == 0

    def is_state_due(self, steps_done: int) -> bool:
        """Whether states are compared before the next step; none needs it that follows none."""
        return steps_done == self._began_at + 1 or (steps_done > 0 and self.is_due(steps_done))

    def is_state_compared(self, steps_done: int) -> bool:
        """Whether states have been compared after `steps_done` steps."""
        return steps_done == self._compared_at

    def compare_states(self, group: Group, steps_done: int, call: str) -> None:
        """Make sure that all processes are in the same state (a flipped bit would spread).

        Args:
            group: the processes, in none of which a step is in flight.
            steps_done: the number of steps done.
            call: the trainer's method that compares them.

        Raises:
            DivergedError: a process is in another state; the message names what differs first.
            PeerError: a process is lost.
        """
        self._compared_at = steps_done
        interruptible(group.compare_states, self._state, steps_done, call)

    def facts(self) -> dict[str, object]:
        """Return what must be the same in every process about model, loss and optimizer."""
        return {
            **layer_settings("layer", self._model),
            **self._loss_facts(),
            **optimizer_settings(self._optimizer),
            FINGERPRINT: fingerprints.fingerprint(self._model, self._optimizer),
        }

    def _state(self) -> tuple[dict[str, object], dict[str, str]]:
        """Return tensors by name, and settings by name."""
        tensors = dict(fingerprints.whole_state(self._model, self._optimizer))
        return tensors, optimizer_settings(self._optimizer)

    def _loss_facts(self) -> dict[str, str]:
        """Return the settings and the class weights of a loss that is a module."""
        if not isinstance(self._loss, nn.Module):
            return {}
        weights = {
            f"the digest of loss {name}": fingerprints.tensor_digest(value)
            for name, value in self._loss.named_buffers()
        }
        return {**layer_settings("loss", self._loss), **weights}
