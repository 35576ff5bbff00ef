"""The graph of autograd: the numbers of its nodes, and where a backward pass is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from evenstep.private_torch.names import attribute, private

_STAGES_AND_COPIES = "see in which stage, or by which model, a node was made"
with torch.inference_mode(False), torch.enable_grad():
    _one = torch.ones(1, 1, requires_grad=True, device="cpu")
    _row = torch.zeros(1, dtype=torch.int64, device="cpu")
    _SUM: Any = _one.sum().grad_fn
    _EMBEDDING: Any = F.embedding(_row, _one, sparse=True).grad_fn
    _GATHER: Any = torch.gather(_one, 0, _row[None], sparse_grad=True).grad_fn
    LEAF: Any = type(_SUM.next_functions[0][0])
    """The class of the nodes that add to the gradient of a leaf, which they have as `variable`."""

next_number: Callable[[], int] = private("torch.autograd", "_get_sequence_nr", _STAGES_AND_COPIES)
"""Return the number that the next node of the calling thread gets."""

_number_of = attribute(_SUM, "_sequence_nr", _STAGES_AND_COPIES)

backward_pass: Callable[[], int] = private(
    "torch._C", "_current_graph_task_id", "see whether a backward pass is running"
)
"""Return the number of the backward pass that the calling thread computes; -1 if it does not."""

node_here: Callable[[], Any] = private(
    "torch._C",
    "_current_autograd_node",
    "keep gradients of tables as rows",
    public_way=lambda: None,  # then they are dense
)
"""Return the node whose backward pass the calling thread computes; None outside of one."""


def _by_torch(tensors: tuple[torch.Tensor, ...], roots: Any, *_: object, **__: object) -> None:
    torch.autograd.backward(tensors, roots)


run_backward: Callable[..., object] = private(
    "torch.autograd.Variable._execution_engine",
    "run_backward",
    "begin a backward pass without torch's Python code around its engine",
    public_way=_by_torch,
)
"""Run a backward pass, as autograd's engine takes its arguments."""


def _refuses_to_disable(_ignores_tracing: bool) -> bool:
    """Return whether there are hooks: torch refuses to disable them while some are in use."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("never shown"):
            return False
    except RuntimeError:
        return True


saving_hooks: Callable[[bool], object] = private(
    "torch._C._autograd",
    "_top_saved_tensors_default_hooks",  # not in torch 2.6
    "refuse torch.autograd.graph.saved_tensors_hooks around a step",
    public_way=_refuses_to_disable,
)
"""Return something true if the calling thread has hooks on saved tensors, given False."""

_of_layer = attribute(_EMBEDDING, "_saved_sparse", "find functions that give sparse gradients")
_of_gather = attribute(_GATHER, "_saved_sparse_grad", "find functions that give sparse gradients")


def number_of(node: Any) -> int:
    """Return a node's number, which grows in the order in which a thread makes nodes."""
    return int(_number_of(node)())


def is_in_backward() -> bool:
    """Return whether the calling thread computes a backward pass."""
    return backward_pass() != -1


def gives_sparse_gradient(node: Any) -> bool:
    """Return whether the function that made a node gives a sparse gradient."""
    return is_sparse_lookup(node) or bool(hasattr(node, "_saved_sparse_grad") and _of_gather(node))


def is_sparse_lookup(node: Any) -> bool:
    """Return whether a node looks rows of a table up, and gives a sparse gradient."""
    return bool(hasattr(node, "_saved_sparse") and _of_layer(node))


def has_hooks(node: Any) -> bool:
    """Return whether somebody watches what a node gets or gives (`node.register_hook`)."""
    found = False
    for register in (node.register_hook, node.register_prehook):
        ours = register(_nothing)
        found |= len(ours.hooks_dict_ref()) > 1
        ours.remove()
    return found


def _nothing(*_: object) -> None:
    """Change no gradient."""


class _AllLeaves(torch.autograd.Function):
    """Has a node behind which are those of all tensors that it is given."""

    @staticmethod
    def forward(ctx: Any, *leaves: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: object) -> Any:
        raise AssertionError("its graph is only looked at")


def first_with_hooks_on_sum(parameters: Sequence[torch.Tensor]) -> int | None:
    """Return the number of a parameter whose gradient's adding somebody watches, if there is one.

    The hooks are on the node that adds to the gradient, as `node.register_hook` sets them.
    """
    may_have = [
        number
        for number, one in enumerate(parameters)
        if one.requires_grad and one.layout is torch.strided
        if not (one.is_nested or one.is_inference() or torch.nn.parameter.is_lazy(one))
    ]
    if not may_have:
        return None
    with torch.inference_mode(False), torch.enable_grad():
        behind = _AllLeaves.apply(*(parameters[number] for number in may_have))  # type: ignore[no-untyped-call]
    nodes = zip(may_have, behind.grad_fn.next_functions, strict=True)
    return next((number for number, (node, _) in nodes if has_hooks(node)), None)


def nodes_of(root: torch.Tensor) -> Iterator[Any]:
    """Yield each node of the graph of a tensor."""
    nodes, seen = [root.grad_fn], set[object]()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        nodes.extend(before for before, _ in node.next_functions)
