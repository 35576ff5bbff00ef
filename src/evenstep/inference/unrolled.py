"""A model as one function of Python that calls its operations in order, without its modules."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp


class _Through(fx.Tracer):
    """Records the functions that layers call, not the calls of layers."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


def unrolled(net: nn.Module, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Return a function with the operations of `net` on inputs like these.

    The weights are copied. A linear layer on rows becomes the one operation that torch makes of it,
    with the same bits, and so does `F.relu`.

    Raises:
        Exception: the path through the model depends on values.
    """
    program = fx.GraphModule(net, _Through().trace(net))
    ShapeProp(program).propagate(*inputs)
    graph, constants = program.graph, dict[str, torch.Tensor]()
    known: dict[Any, fx.Node] = {}

    def constant(value: torch.Tensor) -> fx.Node:
        name = f"constant_{len(constants)}"
        constants[name] = value
        return graph.create_node("get_attr", name)

    for node in [*graph.nodes]:
        with graph.inserting_before(node):
            if node.op == "get_attr":
                if node.target not in known:
                    value = operator.attrgetter(node.target)(program)
                    known[node.target] = constant(value.detach().clone())
                node.replace_all_uses_with(known[node.target])
                graph.erase_node(node)
            elif node.target is F.relu and not node.kwargs.get("inplace"):
                node.target, node.args, node.kwargs = torch.relu, node.args[:1], {}
            elif node.target is F.linear and len(node.args) == 3 and node.args[2] is not None:
                rows, weight, bias = node.args
                if len(rows.meta["tensor_meta"].shape) == 2 and weight.op == "get_attr":
                    transposed = constant(constants[weight.target].t())
                    node.target, node.args = torch.addmm, (bias, rows, transposed)
    held = fx.GraphModule(constants, graph)
    return functools.partial(type(held).forward, types.SimpleNamespace(**constants))
