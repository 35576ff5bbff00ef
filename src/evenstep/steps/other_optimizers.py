"""Optimizers that have stepped the model beside the trainer's own: a checkpoint must not lack them.

Nothing but a step shows that an optimizer belongs to a training, so torch reports each one. The
gradients that it has used are noted: the trainer's next step replaces them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import optree
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from evenstep.engine.interrupts import INTERRUPTS
from evenstep.replicas import inner_optimizers, note_left
from evenstep.steps.left_gradients import LeftGradients
from evenstep.steps.update import is_in_a_trainer

logger = logging.getLogger("evenstep")


class OtherOptimizers:
    """Notes which optimizers step while it is open.

    Args:
        model: the user's model.
        optimizer: the trainer's own optimizer, which is saved with those inside it.
        left: forgets gradients that an optimizer has used.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, left: LeftGradients
    ) -> None:
        self._model = model
        self._own = optimizer
        self._left = left
        self._stepped = weakref.WeakSet[torch.optim.Optimizer]()
        self._judged = weakref.WeakSet[torch.optim.Optimizer]()
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> None:
        """Begin to note steps; a signal that comes in the middle of one is handled at its end."""
        INTERRUPTS.shielded(type(self._own).step)
        self._hook = register_optimizer_step_post_hook(self._note)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End it."""
        assert self._hook is not None
        self._hook.remove()

    def say_what_is_lost(self, read: Callable[[], Any]) -> None:
        """Log once for each optimizer of the model that its state is not in a checkpoint.

        Args:
            read: returns the states of the user's objects in a checkpoint, in any nesting.
        """
        found = [*self._of_the_model()]
        if not found:
            return
        kept = {*map(id, _tensors_in(read()))}
        for optimizer, names, state in found:
            self._judged.add(optimizer)
            if not kept.issuperset(map(id, state)):
                _say(optimizer, names)

    def _note(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Torch calls this after each step of an optimizer, in any thread."""
        for group in optimizer.param_groups:
            note_left(group["params"])
        self._left.before = None
        if INTERRUPTS.pending:  # they came in the middle of a step of the user's own
            INTERRUPTS.deliver(beyond=2)
        if optimizer is self._own or optimizer in self._stepped:
            return
        if not is_in_a_trainer(optimizer):
            self._stepped.add(optimizer)

    def _of_the_model(
        self,
    ) -> Iterator[tuple[torch.optim.Optimizer, list[str], list[torch.Tensor]]]:
        """Yield optimizers with a state, the parameters of the model they hold, and the state."""
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        inner = [*inner_optimizers(self._own, own_state=False).values()]
        for optimizer in {*self._stepped} - {*self._judged} - {self._own, *inner}:
            held = [one for group in optimizer.param_groups for one in group["params"]]
            own = [names[one] for one in held if one in names]
            state = _tensors_in([*optimizer.state.values()])
            if own and state:
                yield optimizer, own, state


def _tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _say(optimizer: torch.optim.Optimizer, names: list[str]) -> None:
    kind = type(optimizer).__name__
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    logger.warning(
        "the checkpoint does not hold the state of another optimizer, %s, which has stepped %s%s "
        "of the model: the resumed training would differ. Give the optimizer to the trainer, "
        'Trainer(..., state={"%s": ...}), and to Trainer.load in the same way',
        kind,
        ", ".join(names[:3]),
        more,
        kind.lower(),
    )
