"""One shard's forward and backward pass, from its examples to its value in the canonical tree."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from evenstep.batch import Batch
from evenstep.batch.rng import ShardRandomness
from evenstep.collectives import TreeSum
from evenstep.collectives.table_rows import TableRows, tables_in
from evenstep.engine import streams
from evenstep.errors import ContractError, ModelError
from evenstep.options.experiment import autocast
from evenstep.private_torch.graph import (
    LEAF,
    gives_sparse_gradient,
    next_number,
    nodes_of,
    number_of,
    run_backward,
)
from evenstep.private_torch.modules import sum_hooks
from evenstep.private_torch.tensors import version_of
from evenstep.replicas import JUDGE, Replica
from evenstep.replicas.replica import reshaped_error, same_bits
from evenstep.shard.compiler import Program
from evenstep.shard.gradients import GradientStream
from evenstep.shard.loss import Number, Outputs, ShardLoss, ShardObjective
from evenstep.shard.partial_sum import (
    HALF_PRECISION,
    AccumulatedTwiceError,
    PartialSum,
    Tensors,
    add_buffers,
    add_gradients,
    is_averaged,
    receive,
    refuse_twice,
    rows_in,
    sparse_with_own_memory,
    unjudged_error,
    weighted,
    with_own_memory,
    with_rows,
)

Leaf: TypeAlias = "tuple[Number, Number] | tuple[Number, Number, Outputs]"
"""A shard's (total, count), and its outputs if it has any, detached from the graph."""


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class OuterModelError(ContractError):
    """The loss of a shard, computed on a copy of the model, depends on the user's own module."""


class ShardWork(NamedTuple):
    """Everything that computing one shard needs besides a replica.

    Attributes:
        shard: the shard's number.
        batch: the shard's examples, in the replica's memory.
        examples: the number of examples, the shard's weight in a mean over those of the batch; None
            for a shard that is the whole batch, with weight 1.
        divisor: what the backward pass divides by at its root: the number of examples in the batch;
            1 for a shard that is the whole batch.
        random_seed: returns the seed of the shard's random numbers.
        precision: the dtype that autocast computes in; None for the parameters' own.
        program: the compiled shard; None to compute it eagerly.
    """

    shard: int
    batch: Batch
    examples: int | None
    divisor: int
    random_seed: Callable[[], int]
    precision: torch.dtype | None
    program: Program | None = None

    @property
    def is_only_shard(self) -> bool:
        """Whether the shard is the whole batch."""
        return self.examples is None


def compute_shard(
    replica: Replica,
    work: ShardWork,
    *,
    objective: ShardObjective,
    tree: TreeSum[PartialSum],
    stream: GradientStream | None = None,
    may_accumulate: bool = True,
    observe: Callable[[int, PartialSum], None] | None = None,
    finish: Callable[[Sequence[Any]], object] = streams.finish,
) -> Leaf:
    """Run one shard forward and backward, and put its gradients and buffers into the tree.

    Where the sum of the shards to its left is ready, the backward pass accumulates onto that sum:
    it is `left + right`, as the tree wants it, without a second set of gradients. Excluded are
    sparse gradients, whose repeated rows must be summed first; hooks on a layer's backward pass and
    an observer, which must see each shard's own gradients; and objectives with a backward pass of
    their own.

    Args:
        replica: the replica of the calling lane.
        work: the shard.
        objective: computes the shard's loss as (total, count).
        tree: receives the shard's value, except for gradients that `stream` takes.
        stream: takes gradients as soon as they are final; None to leave them all to the tree.
        may_accumulate: whether a backward pass adds to each gradient at most once.
        observe: called with the shard's number and its own value.
        finish: waits for the shard's kernels on an accelerator, given the fence behind them.

    Returns:
        The shard's (total, count), detached.
    """
    if replica.buffers:
        replica.open_shard()
    known = replica.has_run_backward or work.program is not None
    if may_accumulate and known and observe is None and replica.may_accumulate:
        node, left = tree.claim(work.shard, functools.partial(_fits, replica))
    else:
        node, left = work.shard, None
    if left is not None and left.fence is not None:
        receive(left, replica.device)
    is_on_gpu = replica.device.is_accelerator
    with ShardRandomness(work.random_seed):
        if work.program is not None:
            leaf, value = _run_program(replica, work, work.program, left)
        else:
            leaf, value = _run_eagerly(
                replica, work, objective, node, left, stream, may_accumulate=may_accumulate
            )
    if may_accumulate and replica.may_accumulate and not value.is_dense:
        raise AccumulatedTwiceError("a function that is no layer gave a sparse gradient")
    if is_on_gpu:
        leaf, differ = streams.copied_to_host((leaf, replica.differences()))
        finish([streams.fence_here(replica.device)])  # others must not wait for a hang
        value.buffers = contributions(replica, work, replica.changed_buffers(differ))
    if left is not None:
        value.buffers = add_buffers(left, value) if replica.buffers else []
        value.weights = (*left.weights, *value.weights)
        value.lo = left.lo
    if is_on_gpu:
        value.fence = streams.fence_here(replica.device)
    if observe is not None:
        observe(work.shard, value)
    tree.put(node, value)
    return leaf


def _fits(replica: Replica, left: PartialSum) -> bool:
    """Return whether a backward pass on `replica` may accumulate onto the sum `left`."""
    return left.is_dense and left.replica.device.memory == replica.device.memory


def _run_program(
    replica: Replica, work: ShardWork, program: Program, left: PartialSum | None
) -> tuple[Leaf, PartialSum]:
    """Compute a shard by its compiled program, and add its gradients onto those of `left`."""
    parameters = [parameter.detach() for parameter in replica.parameters]
    divisor = work.divisor
    total, count, gradients, buffers = program.run(parameters, replica.opening, work.batch, divisor)
    gradients = [one if one is None else with_own_memory(one) for one in gradients]
    if left is not None:
        gradients = add_gradients(left.gradients, gradients)
    changed = [
        None if same_bits(now, opening) else now
        for now, opening in zip(buffers, replica.opening, strict=True)
    ]
    given = changed and contributions(replica, work, changed)
    shard, weight = work.shard, work.examples or 1
    value = PartialSum(gradients, given, (weight,), replica, shard, shard + 1)
    return weighed(total, count, divisor), value


def _run_eagerly(
    replica: Replica,
    work: ShardWork,
    objective: ShardObjective,
    node: int,
    left: PartialSum | None,
    stream: GradientStream | None,
    *,
    may_accumulate: bool,
) -> tuple[Leaf, PartialSum]:
    """Compute a shard by torch's own kernels, accumulating its gradients onto those of `left`."""
    for parameter in replica.parameters:
        parameter.grad = None
    opened = next_number()
    total, count, *outputs = _forward(replica, work, objective)
    if replica.outer and total.requires_grad:
        _refuse_outer_model(total, replica, opened)
    if left is not None or stream is not None:
        _refuse_early_gradients(replica)
    if left is not None and not replica.has_accumulated:
        _refuse_sparse_functions(total)
        replica.has_accumulated = True
    before: list[int] = []
    taking, rows = None, dict[int, torch.Tensor]()
    looks = replica.tables is None or not may_accumulate
    has_none = total.grad_fn is None or replica.has_hooks
    if (looks or replica.tables) and not (has_none or work.is_only_shard):
        if looks:
            replica.tables = tables_in(total, replica.parameters)
        unwatched = {
            key: number
            for key, number in (replica.tables or {}).items()
            if not sum_hooks(replica.parameters[number])
        }
        if unwatched:
            taking = TableRows(total, unwatched)
            rows = taking.found
    if stream is not None:
        accumulates = left is not None
        with (
            stream.of_shard(replica, work.shard, node, rows, accumulates=accumulates),
            taking or _NOTHING,
        ):
            _backward(replica, total, work.divisor)
    elif left is not None:
        for parameter, gradient in zip(replica.parameters, left.gradients, strict=True):
            parameter.grad = None if gradient is None or gradient.is_sparse else gradient
            before.append(0 if gradient is None else version_of(gradient))
        with taking or _NOTHING:
            _backward(replica, total, work.divisor)
        refuse_twice(left.gradients, before)
    else:
        with taking or _NOTHING:
            _backward(replica, total, work.divisor)
    value = _collect(replica, work)
    tables = {*rows} | (left.tables if left is not None else set())
    for number in tables:
        lefts = (left.gradients[number], before[number]) if before and left else (None, 0)
        value.gradients[number] = with_rows(
            value.gradients[number], rows.get(number), *lefts, may_accumulate=may_accumulate
        )
    if tables:
        value.tables = rows_in(value.gradients, tables)
    leaf: Leaf = (total.detach(), count)
    if total.dtype in HALF_PRECISION:
        leaf = weighed(total.detach(), count, work.divisor)
    return (*leaf, _detached(outputs[0])) if outputs else leaf, value


def forward_and_backward(replica: Replica, work: ShardWork, objective: ShardObjective) -> ShardLoss:
    """Run a shard forward and backward; return (total, count), and its outputs if it has any.

    The parameters' gradients are those of the shard alone.
    """
    for parameter in replica.parameters:
        parameter.grad = None
    opened = next_number()
    loss = _forward(replica, work, objective)
    if replica.outer and loss[0].requires_grad:
        _refuse_outer_model(loss[0], replica, opened)
    _backward(replica, loss[0], work.divisor)
    return loss


def _detached(outputs: Outputs) -> Outputs:
    """Return copies of outputs without their graph."""
    return {
        name: tuple(map(_copied, value)) if isinstance(value, tuple) else _copied(value)
        for name, value in outputs.items()
    }


def _copied(value: Number) -> Number:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _forward(replica: Replica, work: ShardWork, objective: ShardObjective) -> ShardLoss:
    if work.precision is None:
        return objective(replica.module, work.batch, work.examples)
    with autocast(replica.device.kind, work.precision):
        return objective(replica.module, work.batch, work.examples)


def _backward(replica: Replica, total: torch.Tensor, divisor: int) -> None:
    """Run `(total / divisor).backward()`, on CPUs without torch's Python code around its engine.

    That code handles other arguments, and takes longer than the backward pass of a small layer.
    """
    if not total.requires_grad:
        return
    root = torch.full_like(total, root_gradient(divisor, total.dtype))
    if total.__class__ is torch.Tensor and total.is_cpu and total.is_floating_point():
        given = (total,), (root,), False, False, ()
        run_backward(*given, allow_unreachable=True, accumulate_grad=True)
    else:
        total.backward(root)
    if not replica.has_run_backward:
        if all(parameter.grad is None for parameter in replica.parameters):
            raise _outer_model_error(replica, "no parameter")
        replica.has_run_backward = True


@functools.cache
def root_gradient(divisor: int, dtype: torch.dtype) -> float:
    """Return the gradient that a shard's backward pass begins with, before it is rounded.

    It is 1 / divisor, as in a plain loop that accumulates `(total / divisor).backward()`, and no
    less than the smallest normal number of `dtype`.
    """
    return max(1 / divisor, torch.finfo(dtype).tiny)


def weighed(total: torch.Tensor, count: Number, divisor: int) -> tuple[torch.Tensor, Number]:
    """Return a shard's total and count with the weight that its gradients have.

    It is 1, but for totals in half precision, where 1 / divisor is rounded noticeably: dividing the
    sum of the gradients by the sum of the counts takes the rounding out again.
    """
    if total.dtype not in HALF_PRECISION or divisor == 1:
        return total, count
    root = torch.tensor(root_gradient(divisor, total.dtype), dtype=total.dtype)
    weight = float(root) * divisor
    return total.double() * weight, count * weight


def _refuse_early_gradients(replica: Replica) -> None:
    """Refuse to accumulate where the objective has run a backward pass of its own.

    Raises:
        AccumulatedTwiceError: a parameter has a gradient before the shard's backward pass.
    """
    for parameter in replica.parameters:
        if parameter.grad is not None:
            raise AccumulatedTwiceError("the objective has run a backward pass of its own")


def _refuse_sparse_functions(total: torch.Tensor) -> None:
    """Refuse to accumulate sparse gradients, whose repeated rows must be summed first.

    Raises:
        AccumulatedTwiceError: a function such as `F.embedding` gives a sparse gradient.
    """
    for node in nodes_of(total):
        if gives_sparse_gradient(node):
            raise AccumulatedTwiceError("a function that is no layer gives a sparse gradient")


def _refuse_outer_model(total: torch.Tensor, replica: Replica, opened: int) -> None:
    """Refuse a loss on a copy of the model if it depends on the user's own module.

    Its gradients would go to the user's module, with which another lane computes. Nodes are
    numbered by the thread that makes them: a graph with as many as the last one of this step is
    taken to be like it.

    Args:
        total: the loss.
        replica: the copy.
        opened: the number of the first node that the shard makes.
    """
    last: Any = total.grad_fn
    count = nodes_since(total, opened)
    if count == replica.graph_nodes:
        return
    leaves = [node.variable for node in nodes_of(total) if node.__class__ is LEAF]
    if last is None:
        leaves = [total]
    if not replica.outer.isdisjoint(map(id, leaves)):
        reached = "a parameter of the model itself"
        raise _outer_model_error(replica, reached, OuterModelError)
    replica.graph_nodes = count


def nodes_since(total: torch.Tensor, opened: int) -> int:
    """Return how many nodes the calling thread has made since number `opened`, up to a loss."""
    return 0 if total.grad_fn is None else number_of(total.grad_fn) - opened


def _outer_model_error(
    replica: Replica, reached: str, kind: type[ModelError] = ModelError
) -> ModelError:
    return kind(
        f"the backward pass on {replica.device}, which computes on a copy of the model, reaches "
        f"{reached}: objective(model, *batch) must call the model that it is given, not one from "
        f"outside, and a function in an attribute must not refer to a layer of the model itself"
    )


def _collect(replica: Replica, work: ShardWork) -> PartialSum:
    """Take the gradients and the changed buffers from a replica."""
    gradients: Tensors = []
    is_dense = True
    for parameter in replica.parameters:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and gradient.is_sparse:
            gradient = sparse_with_own_memory(gradient, coalesce=not work.is_only_shard)
            is_dense = False
        elif gradient is not None:
            gradient = with_own_memory(gradient)
        gradients.append(gradient)
    looks_later = replica.device.is_accelerator
    changed = replica.changed_buffers() if replica.buffers and not looks_later else []
    buffers = changed and contributions(replica, work, changed)
    shard, weight = work.shard, work.examples or 1
    return PartialSum(gradients, buffers, (weight,), replica, shard, shard + 1, is_dense)


def contributions(replica: Replica, work: ShardWork, changed: Tensors) -> Tensors:
    """Return what a shard contributes to each buffer, given those that it has changed."""
    return [_contribution(number, buffer, work, replica) for number, buffer in enumerate(changed)]


def _contribution(
    number: int, buffer: torch.Tensor | None, work: ShardWork, replica: Replica
) -> torch.Tensor | None:
    """Return what a shard contributes to the value of a buffer after the step."""
    if buffer is None:
        return None
    name, rule, opening = (
        replica.buffer_names[number],
        replica.rules[number],
        replica.opening[number],
    )
    if buffer.shape != opening.shape:
        raise reshaped_error(name, opening, buffer)
    if rule == "refuse":
        raise ContractError(
            f"a shard has written the buffer {name}, which buffers= refuses: don't write it in "
            f"forward, or give it the rule 'mean', 'first', 'sum', 'max' or 'min'"
        )
    if work.is_only_shard:
        return buffer.clone()
    if rule == "sum":
        return buffer - opening
    if rule == "first":
        return buffer.clone() if work.shard == 0 else None
    if not is_averaged(buffer, rule):
        return buffer.clone()
    if rule == JUDGE and buffer.numel() > 1 and bool((buffer == opening).any()):
        raise unjudged_error(name, "written by each shard in some places only")
    return weighted(buffer, work.examples or 1)
