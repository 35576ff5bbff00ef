"""Refuses tensors in a batch that have a graph, through which no gradient would flow."""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import nn

from evenstep.batch import Batch
from evenstep.batch.cut import name_of, too_deep
from evenstep.batch.own_shards import Shards
from evenstep.batch.whole import Shared
from evenstep.contract.leaves import graph_leaves
from evenstep.errors import BatchError


def refuse_wanted_gradient(batch: Batch, model: nn.Module) -> None:
    """Refuse a tensor that requires a gradient: shards are copies, so it would get none."""
    try:
        paths, leaves, _ = optree.tree_flatten_with_path(batch)
    except RecursionError:
        raise too_deep() from None
    for path, leaf in zip(paths, leaves, strict=True):
        name = name_of(path)
        inside: Any = leaf.batches if isinstance(leaf, Shards) else leaf
        for tensor in optree.tree_leaves(inside):
            tensor = tensor.tensor if isinstance(tensor, Shared) else tensor
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.ndim:
                raise _error(name, tensor, model)


def _error(name: str, tensor: torch.Tensor, model: nn.Module) -> BatchError:
    parameters = {id(one) for one in model.parameters()}
    if any(id(leaf) in parameters for leaf in graph_leaves(tensor)):
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
