"""Backward passes through recorded arrays, queued: `backward`, and `gradients` as new arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from evenstep.errors import MXNetError, hides_own_frames
from evenstep.mxnet.core import tape
from evenstep.mxnet.core.context import Context
from evenstep.mxnet.core.invoke import run
from evenstep.mxnet.core.runtime import Chunk


@hides_own_frames
def backward(heads: Sequence[Any], head_gradients: Any = None, retain_graph: bool = False) -> None:
    """Queue the backward passes of some arrays, one for each context if they are independent.

    Args:
        heads: recorded arrays, differentiated together.
        head_gradients: the gradient of each; None (also for one of them) stands for ones.
        retain_graph: allow another backward pass from them.

    Raises:
        MXNetError: an array was not recorded, or a backward pass has used its graph up.
    """
    given = [None] * len(heads) if head_gradients is None else list(head_gradients)
    for head in heads:
        if not head.is_tracked:
            raise MXNetError(
                f"backward from an array of shape {head.shape} that was not recorded: compute it "
                f"inside `with autograd.record():`, from arrays after their attach_grad()"
            )
    groups: dict[Context, list[int]] = {}
    for number, head in enumerate(heads):
        groups.setdefault(head.context, []).append(number)
    found = [tape.reached(heads[i].chunk.node for i in group) for group in groups.values()]
    if len({node for nodes in found for node in nodes}) < sum(map(len, found)):
        groups = {heads[0].context: list(range(len(heads)))}
        found = [tape.reached(head.chunk.node for head in heads)]
    for (context, group), nodes in zip(groups.items(), found, strict=True):
        _backward(
            context, [heads[i] for i in group], [given[i] for i in group], nodes, retain_graph
        )


def _backward(
    context: Context, heads: Any, given: Any, nodes: Sequence[tape.Node], retain_graph: bool
) -> None:
    reached = [node for node in nodes if node.gradient is not None]
    leaves = [
        (chunk, node.gradient.chunk, node.request)
        for node in reached
        if (chunk := node.chunk) is not None
    ]
    for node in reached:
        node.is_fresh = True
    kept = tape.chunks_of(nodes)
    if not retain_graph:
        tape.spend(nodes)

    def call() -> None:
        with torch.enable_grad():
            tensors = [head.value() for head in heads]
        gradients = [None if one is None else one.value() for one in given]
        tape.accumulate(tensors, gradients, leaves, retain_graph=retain_graph)

    chunks = [gradient for _, gradient, _ in leaves]
    run("backward", context, call, [one for one in given if one is not None], kept, chunks)


def gradients(
    heads: Sequence[Any],
    variables: Sequence[Any],
    head_gradients: Any,
    *,
    retain_graph: bool,
    create_graph: bool,
) -> list[Any]:
    """Queue a backward pass whose gradients are new arrays; see `autograd.grad`."""
    for one in (*heads, *variables):
        if not one.is_tracked:
            raise MXNetError(
                f"an array of shape {one.shape} was not recorded: compute it inside `with "
                f"autograd.record():`, from arrays after their attach_grad()"
            )
    given = [None] * len(heads) if head_gradients is None else list(head_gradients)
    nodes = tape.reached(head.chunk.node for head in heads)
    kept = tape.chunks_of(nodes)
    if not retain_graph:
        tape.spend(nodes)
    context, like = heads[0].context, type(variables[0])
    results = [like(Chunk("grad"), one.spec, context) for one in variables]
    if create_graph:
        inputs = tuple(dict.fromkeys(one.chunk.node for one in (*heads, *variables)))
        for result in results:
            result.chunk.node = tape.Node(result.chunk, inputs)

    def call() -> None:
        with torch.enable_grad():
            tensors = [head.value() for head in heads]
            found = torch.autograd.grad(
                tensors,
                [variable.value() for variable in variables],
                [
                    torch.ones_like(tensor) if one is None else one.value()
                    for tensor, one in zip(tensors, given, strict=True)
                ],
                retain_graph=retain_graph,
                create_graph=create_graph,
            )
        for result, gradient in zip(results, found, strict=True):
            result.chunk.put(gradient)

    run("grad", context, call, [one for one in given if one is not None], kept, results)
    return results
