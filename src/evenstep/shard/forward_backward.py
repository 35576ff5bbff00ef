"""One shard, computed alone, and how the results of shards add up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch

from evenstep.batch import Batch
from evenstep.batch.rng import ShardRandomness
from evenstep.collectives import TreeSum, tree_sum
from evenstep.devices import Device, carry
from evenstep.engine import streams
from evenstep.errors import ModelError
from evenstep.experiment import autocast
from evenstep.replicas import Replica
from evenstep.shard.compiler import Program
from evenstep.shard.gradients import GradientStream, Tensors, add_gradients, refuse_twice, versions
from evenstep.shard.loss import Number, ShardObjective

Leaf: TypeAlias = "tuple[Number, Number]"
"""A shard's (total, count), detached."""


@dataclasses.dataclass
class NodeSum:
    """The value of a node of the canonical tree: what its shards bring to the step.

    Attributes:
        gradients: the sum of the shards' gradients for each parameter; None where no shard
            touched it. Sparse ones are coalesced.
        buffers: for each floating buffer the sum of weight × value over the shards, for an
            integer one the value after shard 0; None where no shard wrote it.
        weights: of its shards, in examples.
        replica: whose memory holds the tensors.
        lo, hi: the shards [lo, hi) that are in it.
        fence: on a GPU, what is to be waited for before the tensors are used.
    """

    gradients: Tensors
    buffers: Tensors
    weights: tuple[int, ...]
    replica: Replica
    lo: int
    hi: int
    fence: Any = None

    @property
    def weight(self) -> int:
        """The sum of the weights."""
        return sum(self.weights)


class ShardWork(NamedTuple):
    """All that one shard of a step needs besides a replica.

    Attributes:
        shard: its number.
        batch: its examples, already in the replica's memory when `compute_shard` gets them.
        weight: its examples; 1 when the shard is `alone`.
        alone: whether it is the step's only shard with examples.
        random_seed: seed of its random ops; None where the model has none.
        watch_backward: whether to look for random ops in its backward pass, and refuse them.
        precision: dtype that autocast computes in; None for the parameters' own.
        program: the compiled shard; None to compute it eagerly.
    """

    shard: int
    batch: Batch
    weight: int
    alone: bool
    random_seed: int | None
    watch_backward: bool
    precision: torch.dtype | None
    program: Program | None = None


def compute_shard(
    replica: Replica,
    work: ShardWork,
    *,
    objective: ShardObjective,
    tree: TreeSum[NodeSum],
    stream: GradientStream | None = None,
    may_accumulate: bool = True,
    observe: Callable[[int, NodeSum], None] | None = None,
) -> Leaf:
    """Run one shard forward and backward and put its gradients and buffers into the tree.

    Where the sum of the shards to its left is there already, the backward pass accumulates onto
    it: `left + right`, as the tree wants it, without a second set of gradients. Not so with sparse
    gradients, whose repeated rows must be summed before anything else, nor with an observer, which
    is shown every shard's own value.

    Args:
        replica: of the lane.
        work: the shard.
        objective: of a shard.
        tree: of everything, but for what `stream` takes.
        stream: takes gradients as they become final.
        may_accumulate: whether a backward pass adds to each gradient once.
        observe: called with the shard's own value.

    Returns:
        (total, count): the shard's detached objective and what it is to be divided by.
    """
    replica.open_shard()
    knows = replica.has_learned or work.program is not None
    may_claim = may_accumulate and knows and not (observe or replica.may_be_sparse)
    node, left = tree.claim(work.shard, lambda value: may_claim and _fits(value, replica))
    if left is not None:
        receive(left, replica.device)
    if work.program is not None:
        leaf, value = _run_program(replica, work, work.program, left)
    else:
        leaf, value = _run_eagerly(replica, work, objective, node, left, stream)
    if observe:
        observe(work.shard, value)
    if left is not None:
        value.buffers = _add_buffers(left, value)
        value.weights = (*left.weights, *value.weights)
        value.lo = left.lo
    if replica.device.kind == "cuda":
        value.fence = streams.fence_here(replica.device)
    tree.put(node, value)
    return leaf


def _run_program(
    replica: Replica, work: ShardWork, program: Program, left: NodeSum | None
) -> tuple[Leaf, NodeSum]:
    """Compute a shard by its compiled program; its gradients come onto those of `left`."""
    randomness = None if work.random_seed is None else ShardRandomness(work.random_seed)
    parameters = [parameter.detach() for parameter in replica.parameters]
    with randomness or nullcontext():
        total, count, gradients, buffers = program.run(parameters, replica.opening, work.batch)
    if left is not None:
        gradients = add_gradients(left.gradients, gradients)
    changed = [
        None if torch.equal(now, opening) else now
        for now, opening in zip(buffers, replica.opening, strict=True)
    ]
    return (total, count), _node(replica, work, gradients, changed)


def _run_eagerly(
    replica: Replica,
    work: ShardWork,
    objective: ShardObjective,
    node: int,
    left: NodeSum | None,
    stream: GradientStream | None,
) -> tuple[Leaf, NodeSum]:
    """Compute a shard by torch's own kernels; its gradients accumulate onto those of `left`."""
    for number, parameter in enumerate(replica.parameters):
        parameter.grad = None if left is None else left.gradients[number]
    if stream is not None:
        with stream.of_shard(replica, work.shard, node, accumulates=left is not None):
            leaf = _forward_backward(replica, work, objective)
    elif left is not None:
        before = versions(left.gradients)
        leaf = _forward_backward(replica, work, objective)
        refuse_twice(left.gradients, before)
    else:
        leaf = _forward_backward(replica, work, objective)
    return leaf, _collect(replica, work)


def add_nodes(left: NodeSum, right: NodeSum) -> NodeSum:
    """Return left + right, in the memory of `left` (which is reused)."""
    device = left.replica.device
    receive(left, device)
    receive(right, device)
    if right.replica.device.memory != left.replica.device.memory:
        right = _carry_node(right, left.replica)
    buffers = _add_buffers(left, right)
    gradients = add_gradients(left.gradients, right.gradients)
    weights = (*left.weights, *right.weights)
    fence = streams.fence_here(device) if device.kind == "cuda" else None
    return NodeSum(gradients, buffers, weights, left.replica, left.lo, right.hi, fence)


def closing_buffers(root: NodeSum) -> Tensors:
    """Return the step's closing buffers: the weighted means (None where nobody wrote)."""
    return [
        total / root.weight
        if total is not None and _is_averaged(total) and root.weight != 1
        else total
        for total in root.buffers
    ]


def divide_gradients(gradients: Sequence[torch.Tensor | None], count: float) -> None:
    """Divide every gradient by `count`, in place."""
    if count != 1:
        for gradient in gradients:
            if gradient is not None:
                gradient.div_(count)


def _forward_backward(replica: Replica, work: ShardWork, objective: ShardObjective) -> Leaf:
    randomness = None if work.random_seed is None else ShardRandomness(work.random_seed)
    if randomness is None and work.precision is None:
        total, count = objective(replica.module, work.batch, work.alone)
    else:
        with randomness or nullcontext(), autocast(replica.device.kind, work.precision):
            total, count = objective(replica.module, work.batch, work.alone)
    if total.requires_grad:
        if not replica.has_learned:
            _refuse_outer_model(total, replica)
        _backward(total, randomness, watch=work.watch_backward)
        replica.has_learned = replica.has_learned or _reached(replica)
    if isinstance(count, torch.Tensor) and count.requires_grad:
        count = count.detach()
    return total.detach(), count


def _backward(total: torch.Tensor, randomness: ShardRandomness | None, *, watch: bool) -> None:
    if randomness is None or not watch:
        total.backward()
        return
    randomness.in_backward = True
    with randomness:
        total.backward()


def _refuse_outer_model(total: torch.Tensor, replica: Replica) -> None:
    """Refuse a first objective on a copy of the model that depends on the user's own module.

    Its gradients would go to the module, which another lane is computing on.
    """
    nodes, seen = [total.grad_fn], set[object]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in replica.outer:
            raise _outer_model_error(replica, "a parameter of the model itself")
        nodes.extend(before for before, _ in node.next_functions)


def _reached(replica: Replica) -> bool:
    """Make sure that the first backward pass on a replica reached that replica's parameters."""
    if all(parameter.grad is None for parameter in replica.parameters):
        raise _outer_model_error(replica, "no parameter")
    return True


def _outer_model_error(replica: Replica, reached: str) -> ModelError:
    return ModelError(
        f"the backward pass on {replica.device}, which computes on a copy of the model, reaches "
        f"{reached}: objective(model, *batch) must call the model that it is given, not one from "
        f"outside"
    )


def _collect(replica: Replica, work: ShardWork) -> NodeSum:
    gradients = [parameter.grad for parameter in replica.parameters]
    for parameter in replica.parameters:
        parameter.grad = None
    if any(gradient is not None and gradient.is_sparse for gradient in gradients):
        gradients = [
            gradient.coalesce() if gradient is not None and gradient.is_sparse else gradient
            for gradient in gradients
        ]
    return _node(replica, work, gradients, replica.changed_buffers())


def _node(replica: Replica, work: ShardWork, gradients: Tensors, changed: Tensors) -> NodeSum:
    buffers = [
        _weigh(buffer, work, opening)
        for buffer, opening in zip(changed, replica.opening, strict=True)
    ]
    return NodeSum(gradients, buffers, (work.weight,), replica, work.shard, work.shard + 1)


def _weigh(
    buffer: torch.Tensor | None, work: ShardWork, opening: torch.Tensor
) -> torch.Tensor | None:
    if buffer is None:
        return None
    if buffer.shape != opening.shape:
        raise ModelError(
            f"a buffer changed its shape from {tuple(opening.shape)} to {tuple(buffer.shape)} in "
            f"forward: evenstep averages buffers over shards and needs one shape; keep such a "
            f"cache in a plain attribute"
        )
    if _is_averaged(buffer):
        return buffer.clone() if work.weight == 1 else buffer * work.weight
    return buffer.clone() if work.shard == 0 else None


def _is_averaged(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _fits(left: NodeSum, replica: Replica) -> bool:
    """Say whether a backward pass on `replica` may accumulate onto the sum `left`."""
    return left.replica.device.memory == replica.device.memory and not any(
        gradient is not None and gradient.is_sparse for gradient in left.gradients
    )


def _add_buffers(left: NodeSum, right: NodeSum) -> Tensors:
    """Add buffer sums; a side that never wrote a buffer stands for its opening value."""
    openings = left.replica.opening
    result: Tensors = []
    for ours, theirs, opening in zip(left.buffers, right.buffers, openings, strict=True):
        if ours is None and theirs is None:
            result.append(None)
        elif not _is_averaged(opening):
            result.append(theirs if ours is None else ours)
        else:
            addend = _unwritten(opening, right) if theirs is None else theirs
            result.append((_unwritten(opening, left) if ours is None else ours) + addend)
    return result


def _unwritten(opening: torch.Tensor, node: NodeSum) -> torch.Tensor:
    """Return the sum, in the tree, of a buffer that none of a node's shards wrote."""
    total = tree_sum([opening * weight for weight in node.weights], torch.add)
    assert total is not None
    return total


def _carry_node(node: NodeSum, replica: Replica) -> NodeSum:
    def moved(tensors: Tensors) -> Tensors:
        return [None if tensor is None else carry(tensor, replica.device) for tensor in tensors]

    gradients, buffers = moved(node.gradients), moved(node.buffers)
    return NodeSum(gradients, buffers, node.weights, replica, node.lo, node.hi)


def receive(node: NodeSum, device: Device) -> None:
    """Order what the calling lane does next behind the kernels that made a node's tensors."""
    if node.fence is not None:
        streams.wait_for([node.fence], device)
        streams.keep((node.gradients, node.buffers))
