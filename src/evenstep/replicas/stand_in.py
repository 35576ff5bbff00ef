"""What stands, in shards, for a tensor that was computed before the step."""

from __future__ import annotations

from typing import Any

import optree
import torch

from evenstep.errors import ContractError


class StandIn(torch.Tensor):
    """Stands, while shards are computed, for a tensor that has a graph from before the step.

    A backward pass would go through that graph once for each shard, and from a copy of the model it
    would lead nowhere. Results that a forward pass keeps, and writes anew before anything reads
    them, do no harm: so a use is refused, not the attribute.

    Attributes:
        place: the name of the attribute that holds the tensor.
    """

    place: str

    @classmethod
    def at(cls, place: str) -> StandIn:
        """Return what stands for a tensor in the attribute `place`."""
        found = torch.Tensor._make_subclass(cls, torch.empty(0))
        found.place = place
        return found

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse whatever is computed with it."""
        given: Any = (args, kwargs or {})
        leaves: list[object] = optree.tree_leaves(given)
        place = next(one.place for one in leaves if isinstance(one, StandIn))
        raise ContractError(
            f"a shard has used the attribute {place} of the model, which holds a tensor that was "
            f"computed before the step and has a graph: the shards of a step can't divide its "
            f"gradient. Compute it in forward, or set its value only: (...).detach()"
        )

    def __deepcopy__(self, memo: object) -> StandIn:
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.place})"


def has_graph(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was computed by a forward pass; not of what stands for one."""
    return type(tensor) is not StandIn and tensor.grad_fn is not None
