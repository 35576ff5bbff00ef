"""Refuses tensors in a batch that have a graph, through which no gradient would flow."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import nn

from evenstep.batch import Batch
from evenstep.batch.cut import too_deep
from evenstep.batch.own_shards import Shards
from evenstep.batch.whole import Shared
from evenstep.errors import BatchError
from evenstep.shard.forward_backward import nodes_of


def refuse_wanted_gradient(batch: Batch, model: nn.Module) -> None:
    """Refuse a tensor that requires a gradient: shards are copies, so it would get none.

    Raises:
        BatchError: names the tensor, and says what to write.
    """
    try:
        paths, leaves, _ = optree.tree_flatten_with_path(batch)
    except RecursionError:
        raise too_deep() from None
    for path, leaf in zip(paths, leaves, strict=True):
        name = "batch" + "".join(f"[{step!r}]" for step in path)
        inside: Any = leaf.batches if isinstance(leaf, Shards) else leaf
        for tensor in optree.tree_leaves(inside):
            tensor = tensor.tensor if isinstance(tensor, Shared) else tensor
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.ndim:
                raise _error(name, tensor, model)


def _error(name: str, tensor: torch.Tensor, model: nn.Module) -> BatchError:
    if _is_computed_by(model, tensor):
        return BatchError(
            f"{name} was computed by the trainer's own model: give the model's input, "
            f"trainer.step(X, y), which calls model(X) itself, shard by shard on all devices"
        )
    source = (
        "was computed from parameters outside the trainer's model"
        if tensor.grad_fn is not None
        else "requires a gradient"
    )
    return BatchError(
        f"{name} {source}, but no gradient flows out of a step into its batch: make what computes "
        f"it a part of the model (nn.ModuleList, and objective=...), or give {name}.detach() if it "
        f"is to be a constant. The gradient of the loss with respect to an example is taken inside "
        f"the objective"
    )


def _is_computed_by(model: nn.Module, tensor: torch.Tensor) -> bool:
    """Return whether the graph of a tensor begins with a parameter of the model."""
    parameters = {id(one) for one in model.parameters()}
    return any(id(getattr(node, "variable", None)) in parameters for node in nodes_of(tensor))
