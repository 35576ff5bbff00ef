"""The update of a step where every parameter has an owner: each process updates what it owns.

The user's own optimizer makes the update. Parameters of others have no gradient here, so torch's
optimizers skip them and keep no state for them. Then every owner's new values go to all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from evenstep.shard.partial_sum import PartialSum
from evenstep.steps.owners.memories import MemoryOwners
from evenstep.steps.owners.reducer import OwnerReducer
from evenstep.steps.proxy_update import ProxyUpdate
from evenstep.steps.step import Step
from evenstep.steps.update import Update, refuse_other_norm


class OwnedUpdate(Update):
    """Ends a step with the user's optimizer on the parameters that this process owns.

    Attributes:
        owners: brings gradients to their owners, and new values from them; None while the process
            trains alone: then it owns everything.
        memories: updates in several memories of a process that trains alone, side by side; None
            to update in the first.
    """

    owners: OwnerReducer | None = None
    memories: MemoryOwners | None = None
    _has_told = False

    def _ready(self, step: Step, count: float, root: PartialSum) -> None:
        """Get the gradients ready; no process updates until all of them are at this point.

        So an error in `before_update` of one process leaves the model of each as it was.
        """
        self._has_told = False
        try:
            super()._ready(step, count, root)
        except Exception as error:
            if self.owners is not None and not self._has_told:
                self.owners.exchange(step.number, {}, error)
            raise
        if not self._has_told:
            self._tell(step, {})

    def _update(self, step: Step, count: float, root: PartialSum) -> None:
        super()._update(step, count, root)
        if self.owners is not None:
            self.owners.spread(step.number, root.present)

    def _step(self, *closure: Callable[[], float]) -> None:
        if self.memories is None:
            super()._step(*closure)
        else:
            self.memories.step(super()._step)

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
        total = total_norm(self._tell(step, own), self._replicas.home.parameters)
        if self._clip_norm == math.inf:
            step.outputs = {"grad_norm": float(total), **step.outputs}
            return
        nn.utils.clip_grads_with_norm_(holders, self._clip_norm, total)
        step.outputs = {**step.outputs, "grad_norm": float(total)}

    def _tell(self, step: Step, norms: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        self._has_told = True
        return {} if self.owners is None else self.owners.exchange(step.number, norms)


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
    groups = _group_tensors_by_device_and_dtype([alike], with_indices=True)
    places = [place for _, indices in groups.values() for place in indices]
    whole: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([norms[numbers[place]] for place in places])
    )
    return whole
