"""The tensors that a loss depends on: all that can learn must be parameters of the model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import optree
import torch
from torch import nn

from evenstep.batch import Batch
from evenstep.errors import ContractError
from evenstep.private_torch.graph import LEAF, nodes_of
from evenstep.replicas import Replica


def leaves_of(total: torch.Tensor, replica: Replica, batch: Batch) -> list[torch.Tensor]:
    """Return the leaves of a loss's graph that are neither parameters nor the shard's examples."""
    own = {id(parameter) for parameter in replica.parameters}
    own.update(map(id, optree.tree_leaves(batch)))
    return [leaf for leaf in graph_leaves(total) if id(leaf) not in own]


def graph_leaves(total: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with which the graph of a tensor begins: itself if it is one."""
    if total.grad_fn is None and total.requires_grad:
        return [total]
    return [node.variable for node in nodes_of(total) if node.__class__ is LEAF]


def refuse_strange_leaves(
    first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], objective: Any
) -> None:
    """Refuse a loss that depends on tensors with gradients that outlive the shard.

    A leaf that both computations of a shard have reached was there before. A tensor that the
    objective makes for itself (the interpolated images of a gradient penalty) is a different one
    each time.
    """
    again = {id(leaf) for leaf in second}
    strangers = [leaf for leaf in first if id(leaf) in again]
    if not strangers:
        return
    names = _names_of(strangers, objective)
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    raise ContractError(
        f"the loss depends on {shown}, which requires a gradient but is not a parameter of the "
        f"model: its gradient would be a sum over some shards, not the batch's mean. Make it part "
        f"of the model (an nn.Module that holds both), or compute with it under torch.no_grad()"
    )


def _names_of(tensors: Sequence[torch.Tensor], objective: Any) -> list[str]:
    known = {
        id(parameter): f"the parameter {name} of a {type(module).__name__} outside the model"
        for module in _modules_in(objective)
        for name, parameter in module.named_parameters()
    }
    return [known.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)}") for tensor in tensors]


def _modules_in(value: Any, depth: int = 6) -> Iterator[nn.Module]:
    """Yield the modules that a function reaches: bound, in a partial, in its closure or globals."""
    if isinstance(value, nn.Module):
        yield value
    elif depth and not isinstance(value, type | ModuleType):
        for part in _parts_of(value):
            yield from _modules_in(part, depth - 1)


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, list | tuple):
        return [*value]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        variables = inspect.getclosurevars(value)
        defaults = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [*defaults, *variables.nonlocals.values(), *variables.globals.values()]
    return [*vars(value).values()] if hasattr(value, "__dict__") else []
