"""Computes a shard twice from the same state; other bits mean state that evenstep doesn't see."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from evenstep.batch import Batch
from evenstep.checkpoint.fingerprint import tensor_digest
from evenstep.collectives import TreeSum
from evenstep.collectives.tree import tree_plan
from evenstep.contract.leaves import leaves_of
from evenstep.contract.module_state import (
    Attributes,
    attributes_of,
    changed_attributes,
    elsewhere,
    parameter_marks,
    state_of,
)
from evenstep.contract.outside.foreign_draws import ForeignDraws, refuse_foreign_draws
from evenstep.contract.outside.outer_module import on_copies_alone
from evenstep.contract.outside.process_settings import ProcessSettings
from evenstep.contract.rehearsal import cloned
from evenstep.errors import ContractError
from evenstep.private_torch.graph import next_number
from evenstep.replicas import Replica, written_error
from evenstep.replicas.replica import same_bits, strided_parts
from evenstep.shard.forward_backward import Leaf, ShardWork, compute_shard, nodes_since
from evenstep.shard.loss import Number, ShardObjective
from evenstep.shard.partial_sum import PartialSum, add


@dataclasses.dataclass(frozen=True)
class ShardResult:
    """What one computation of a shard has given.

    Attributes:
        leaf: its total and count.
        value: its gradients and buffers.
        leaves: the tensors that its loss depends on and that require a gradient, except the
            parameters of the replica and the shard's own examples.
        attributes: the module's plain attributes afterwards.
    """

    leaf: Leaf
    value: PartialSum
    leaves: list[torch.Tensor]
    attributes: Attributes


def compute_twice(
    replica: Replica, work: ShardWork, objective: ShardObjective, *, home: Replica | None
) -> tuple[ShardResult, Sequence[torch.Tensor]]:
    """Compute a shard twice and compare the bits.

    On a copy of the model, parameters and buffers lie at other addresses the second time. `home`
    has the model that it was copied from; None for the model itself.

    Returns:
        The first result, and the leaves of the second.

    Raises:
        ContractError: the results differ, a parameter was written, a setting of the process was
            changed, or numbers were drawn from a generator that lives on from shard to shard.
    """
    module = replica.module
    attributes = attributes_of(module)
    compute = functools.partial(compute_observed, replica, work, objective)
    settings = ProcessSettings()
    apart = nullcontext() if home is None else on_copies_alone(home)
    with unwritten(module), ForeignDraws() as first_draws, apart:
        first = compute(around=settings)
    settings.refuse_changed()
    moved = nullcontext if home is None else functools.partial(elsewhere, replica)
    in_backward = settings if first_draws.has_run_in_backward else nullcontext()
    with ForeignDraws() as second_draws, moved(), in_backward:
        second = compute()
    settings.refuse_changed()
    refuse_foreign_draws(first_draws, second_draws)
    differing = first_difference(replica, first, second)
    if differing:
        if home is not None:
            _refuse_rounding_by_address(replica, compute, first, second)
        _refuse_hidden_generators(compute)
        raise repeat_error(differing, changed_attributes(attributes, first.attributes))
    return first, second.leaves


def _refuse_rounding_by_address(
    replica: Replica, compute: Callable[[], ShardResult], here: ShardResult, there: ShardResult
) -> None:
    """Refuse a shard that gives one result at some addresses, and a different one at others.

    `here` is the result at the addresses of `replica`, `there` at others.
    """
    again = [compute(), compute()]
    with elsewhere(replica):
        moved = compute()
    differing = first_difference(replica, here, there)
    if not any(first_difference(replica, here, one) for one in again) and not first_difference(
        replica, there, moved
    ):
        raise ContractError(
            f"the same shard gives two results where its parameters and buffers lie at other "
            f"addresses in memory, though at multiples of 64 bytes: {differing}. Every device has "
            f"other addresses, so an operation of the model (a kernel of your own, or of a "
            f"library) must not round by them: compute with copies at fixed offsets, or with an "
            f"operation of torch"
        )


@contextmanager
def unwritten(module: nn.Module) -> Iterator[None]:
    """Refuse shards that write to the parameters of `module` inside `with`; that comes first."""
    before = parameter_marks(module)
    try:
        yield
    except ContractError:
        _refuse_written(before, parameter_marks(module))
        raise
    _refuse_written(before, parameter_marks(module))


def _refuse_written(before: Mapping[str, object], after: Mapping[str, object]) -> None:
    written = [name for name, mark in after.items() if mark != before.get(name)]
    if written:
        raise written_error(written)


def _refuse_hidden_generators(compute: Callable[[], ShardResult]) -> None:
    """Refuse draws from generator objects of numpy, which take long to find."""
    with ForeignDraws(thorough=True) as first:
        compute()
    with ForeignDraws(thorough=True, after=first) as second:
        compute()
    refuse_foreign_draws(first, second)


def compute_observed(
    replica: Replica,
    work: ShardWork,
    objective: ShardObjective,
    around: AbstractContextManager[object] | None = None,
) -> ShardResult:
    """Compute a shard by itself, the objective inside `around`, and return all that it gives."""
    leaves: list[torch.Tensor] = []
    gradients: list[torch.Tensor | None] = []
    values: list[PartialSum] = []

    def watched(
        model: nn.Module, batch: Batch, examples: int | None
    ) -> tuple[torch.Tensor, Number]:
        opened = next_number()
        with around or nullcontext():
            total, count, *_ = objective(model, batch, examples)
        leaves.extend(leaves_of(total, replica, batch))
        if replica.outer.isdisjoint(map(id, leaves)):  # so nothing need look for them again
            replica.graph_nodes = nodes_since(total, opened)
        gradients.extend(leaf.grad for leaf in leaves)
        _give_gradients(leaves, [None] * len(leaves))
        return total, count

    try:
        leaf = compute_shard(
            replica,
            work._replace(batch=cloned(work.batch)),
            objective=watched,
            tree=TreeSum(tree_plan(1, 1), add),
            may_accumulate=False,
            observe=lambda shard, value: values.append(value),
        )
    finally:
        _give_gradients(leaves, gradients)
    return ShardResult(leaf, values[0], leaves, state_of(replica))


def _give_gradients(
    leaves: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> None:
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient


REMEDY = (
    "Give it to the objective as part of the batch, keep it in a buffer (buffers= chooses its "
    "value after a step), or write it in after_update="
)


def first_difference(replica: Replica, first: ShardResult, second: ShardResult) -> str:
    """Return what differs first between two results; an empty text if nothing does."""
    for name, ours, theirs in zip(("total", "count"), first.leaf[:2], second.leaf[:2], strict=True):
        if not same_bits(torch.as_tensor(ours), torch.as_tensor(theirs)):
            return f"its {name} is {float(ours):.9g} and then {float(theirs):.9g}"
    pairs = zip(_named(replica, first.value), _named(replica, second.value), strict=False)
    for (name, mine), (_, its) in pairs:
        if not are_alike(mine, its):
            return f"{name} differs the second time"
    return ""


def digests_of(replica: Replica, result: ShardResult) -> dict[str, str]:
    """Return the digest of each tensor that a shard has given, by its name in messages."""
    total, count = (torch.as_tensor(number) for number in result.leaf[:2])
    named = {"its total": total, "its count": count, **dict(_named(replica, result.value))}
    return {
        name: " ".join(map(tensor_digest, strided_parts(tensor)))
        for name, tensor in named.items()
        if tensor is not None
    }


def _named(replica: Replica, value: PartialSum) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield the gradients and buffers of a shard, each with its name in messages."""
    names = [f"the gradient of {name}" for name in replica.names]
    names += [f"the buffer {name}" for name in replica.buffer_names]
    yield from zip(names, [*value.gradients, *value.buffers], strict=False)


def are_alike(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    """Return whether two gradients, or buffers, have the same bits; None is like None."""
    if ours is None or theirs is None:
        return ours is theirs
    if ours.is_sparse and theirs.is_sparse:
        return same_bits(ours, theirs) or same_bits(ours.to_dense(), theirs.to_dense())
    return same_bits(ours, theirs)


def repeat_error(differing: str, changed: list[str]) -> ContractError:
    """Return the error for a shard that gives a different result the second time.

    The text has the first difference, and the attributes that the shard has changed.
    """
    text = (
        f"the same shard, computed twice from the same parameters and buffers, gives two results: "
        f"{differing}. "
    )
    if changed:
        shown = ", ".join(changed[:3])
        return ContractError(
            f"{text}The shard has changed {shown}: state that is passed from one shard to the next "
            f"depends on which device computes which shard. {REMEDY}"
        )
    return ContractError(
        f"{text}Its code reads something that it changes, or that changes by itself: an object "
        f"outside the model (a list, a memory bank), a random generator of its own, the clock. "
        f"Pass what it needs in the batch, and draw random numbers with functions of torch"
    )
