"""The update of a step where every parameter has an owner: each process updates what it owns.

The user's own optimizer makes the update. Parameters of others have no gradient here, so torch's
optimizers skip them and keep no state for them. Then every owner's new values go to all.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from evenstep.errors import PeerError
from evenstep.private_torch.optimizers import by_device_and_dtype
from evenstep.shard.forward_backward import Leaf
from evenstep.shard.partial_sum import PartialSum, Tensors
from evenstep.steps.failures import refuse_other_norm
from evenstep.steps.in_flight.proxy_update import ProxyUpdate
from evenstep.steps.owners.reducer import READY, UPDATED, OwnerReducer
from evenstep.steps.step import Step
from evenstep.steps.update import Update


class OwnedUpdate(Update):
    """Ends a step with the user's optimizer on the parameters that this process owns.

    Attributes:
        owners: brings gradients to their owners, and new values from them; None while the process
            trains alone: then it owns everything.
    """

    owners: OwnerReducer | None = None
    _exchanges: Sequence[str] = ()

    def __call__(self, step: Step, leaves: Sequence[Leaf | None], root: PartialSum) -> None:
        """Settle the loss and update the model; called in a lane.

        The processes meet twice. No process updates until all of them are ready to, so an error in
        `before_update` of one leaves the model of each as it was. No process sends new values until
        all have updated: an error of one's optimizer ends the step in all of them.
        """
        self._exchanges, self._is_half = (READY, UPDATED) if self.owners else (), False
        try:
            super().__call__(step, leaves, root)
        except BaseException as error:
            if self._exchanges:
                with contextlib.suppress(PeerError):  # this error came first
                    self._exchange(step, failure=error)
            raise

    def _ready(self, step: Step, count: float, root: PartialSum) -> None:
        super()._ready(step, count, root)
        if READY in self._exchanges:
            self._exchange(step)

    def _update(self, step: Step, count: float, root: PartialSum) -> None:
        super()._update(step, count, root)
        if self.owners is not None:
            self._exchange(step)
            self.owners.spread(step.number, root.present)
        self._is_half = False

    def _add_own(self, own: Tensors, root: PartialSum) -> None:
        if self.owners is not None:
            root.present = [
                is_present or one is not None
                for is_present, one in zip(root.present, own, strict=True)
            ]
            pairs = zip(own, self.owners.owner_of, strict=True)
            own = [one if owner == self.owners.rank else None for one, owner in pairs]
        super()._add_own(own, root)

    def _clip(self, step: Step, holders: Sequence[Any]) -> None:
        """Scale the gradients to the largest norm of all processes' gradients together."""
        if self.owners is None:
            super()._clip(step, holders)
            return
        assert self._clip_norm is not None
        if self._clip_norm != math.inf:
            refuse_other_norm(step)
        own = {
            i: torch.linalg.vector_norm(one.grad)
            for i, one in enumerate(holders)
            if one.grad is not None
        }
        total = total_norm(self._exchange(step, own), self._replicas.home.parameters)
        if self._clip_norm == math.inf:
            step.outputs = {"grad_norm": float(total), **step.outputs}
            return
        nn.utils.clip_grads_with_norm_(holders, self._clip_norm, total)
        step.outputs = {**step.outputs, "grad_norm": float(total)}

    def _exchange(
        self,
        step: Step,
        norms: Mapping[int, torch.Tensor] = MappingProxyType({}),
        failure: BaseException | None = None,
    ) -> dict[int, torch.Tensor]:
        """Tell all processes that this one is at the next exchange, or why it does not come."""
        assert self.owners is not None
        what, *self._exchanges = self._exchanges
        try:
            found = self.owners.exchange(step.number, what, norms, failure)
        except PeerError:
            self._exchanges = ()
            raise
        self._is_half |= failure is None
        return found


class OwnedProxyUpdate(OwnedUpdate, ProxyUpdate):
    """The same for steps in flight."""


def total_norm(
    norms: Mapping[int, torch.Tensor], parameters: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the norm of all gradients from the norm of each, with the bits of torch.

    `torch.nn.utils.get_total_norm` takes the norm of the tensors' norms too, grouped by device and
    dtype.

    Args:
        norms: the 2-norm of each gradient, by its parameter's number.
        parameters: all parameters; gradients have their devices and dtypes.
    """
    if not norms:
        return torch.tensor(0.0)
    numbers = sorted(norms)
    alike: Any = [torch.empty(0, dtype=parameters[i].dtype) for i in numbers]
    groups = by_device_and_dtype([alike], with_indices=True)
    places = [place for _, indices in groups.values() for place in indices]
    whole: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([norms[numbers[place]] for place in places])
    )
    return whole
