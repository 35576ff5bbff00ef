"""Whether gradients add up over shards: all come from the loss, and two shards give their sum."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from evenstep.collectives.table_rows import TableRows, add_rows, tables_in
from evenstep.contract.repeat import ShardResult, compute_observed
from evenstep.engine.task import is_device_failure
from evenstep.errors import ContractError, EvenstepError
from evenstep.private_torch.graph import nodes_of
from evenstep.replicas import Replica
from evenstep.shard.forward_backward import ShardWork
from evenstep.shard.loss import ShardObjective

Gradients: TypeAlias = "Sequence[torch.Tensor | None]"

_LARGER = 500  # than the tolerance of a loss is that of gradients, which may pass a kink
_MOST = 0.3


def refuse_own_gradients(replica: Replica, work: ShardWork, objective: ShardObjective) -> None:
    """Refuse gradients that don't come from the loss.

    A shard is computed with a loss of zero: what its backward pass then gives was put in by a
    function that ignores the gradient it gets, or by a backward pass inside the forward pass. Every
    shard would add it with the weight that plain torch gives it once.
    """
    name = _learning_from_nothing(replica, _without_loss(replica, work, objective))
    if not name:
        return
    sources: list[str] = []
    _without_loss(replica, work, objective, sources)
    source = sources[0] if sources else "a hook on a tensor or on a layer's backward pass"
    raise ContractError(
        f"the gradients don't add up over the shards: {source} gives {name} a gradient that does "
        f"not come from the loss, so each shard would add all of it. Return the term that it "
        f"stands for with the model's output and add it to the loss: objective=... returns (total "
        f"+ term * len(y), len(y)). If training is to depend on the number of shards: "
        f"Experiment(separable=False)"
    )


def _without_loss(
    replica: Replica,
    work: ShardWork,
    objective: ShardObjective,
    sources: list[str] | None = None,
) -> ShardResult:
    """Compute a shard with a loss of zero; note in `sources` what makes a gradient out of zeros."""

    def zeroed(model: Any, batch: Any, examples: int | None) -> Any:
        total, *others = objective(model, batch, examples)
        if sources is not None:
            if _is_learning([one.grad for one in replica.parameters]):
                sources.append("a backward pass inside the forward pass or the objective")
            for node in nodes_of(total):
                _watch(node, sources)
        return total * 0.0, *others

    return compute_observed(replica, work, zeroed)


def _watch(node: Any, sources: list[str]) -> None:
    """Note a node of the graph that gives a gradient though it gets none."""

    def compare(given: Gradients, got: Gradients) -> None:
        if _is_learning(given) and not _is_learning(got):
            name = node.name().removesuffix("Backward")
            sources.append(
                f"the backward pass of {name}, which does not depend on the gradient that it gets,"
            )

    if not hasattr(node, "variable"):
        node.register_hook(compare)


def _is_learning(gradients: Gradients) -> bool:
    """Whether a gradient has a number that is not zero; infinity times zero is none."""
    for gradient in gradients:
        if gradient is not None:
            numbers = gradient.coalesce().values() if gradient.is_sparse else gradient
            if bool((numbers.isfinite() & (numbers != 0)).any()):
                return True
    return False


def _learning_from_nothing(replica: Replica, result: ShardResult) -> str:
    """Return the first parameter with a gradient that is not zero; an empty text if none has."""
    named = zip(replica.names, result.value.gradients, strict=True)
    return next((name for name, gradient in named if _is_learning([gradient])), "")


def gradients_of(replica: Replica, total: torch.Tensor, divisor: int) -> Gradients | None:
    """Return the gradients of a loss in the scale that a step gives them; None if it has none.

    Nothing is left in the parameters' `grad`. `divisor` is what a step divides the loss by before
    its backward pass.
    """
    parameters = [one for one in replica.parameters if one.requires_grad]
    if not total.requires_grad or not parameters:
        return None
    try:
        root = total / divisor
        with TableRows(root, tables_in(root, parameters)) as rows:
            found: list[torch.Tensor | None]
            found = [*torch.autograd.grad(root, parameters, allow_unused=True)]
        for number, one in enumerate(found):  # functions may reuse theirs
            own = None if one is None else one.clone()
            found[number] = add_rows(own, rows.found.get(number))
        return found
    except EvenstepError:
        raise
    except Exception as error:
        if is_device_failure(error):
            raise
        return None  # reentrant checkpoints, for instance, take `backward()` only


def refuse_other_sum(
    replica: Replica,
    together: Gradients,
    apart: Sequence[Gradients],
    tolerance: float,
    *,
    loss: float,
) -> None:
    """Refuse gradients of some shards together that differ from the sum of those apart.

    Each parameter's gradient is judged by its length: rounding may change single elements much. It
    may also be zero but for rounding, so the others' elements count as well. All may be zero but
    for rounding, too (a model that is compared with itself): then they are so small that parameters
    of twice their size would change the loss by less than its rounding.

    `tolerance` is the relative difference that a sum of losses may have; `loss` is what `together`
    are the gradients of.
    """
    named = zip(replica.names, replica.parameters, strict=True)
    names = [name for name, one in named if one.requires_grad]
    lengths = [0.0 if one is None else _length(one) for one in together]
    noise = tolerance * max(map(_typical_size, together, lengths))
    size = math.hypot(*(_length(one.detach()) for one in replica.parameters))
    least = tolerance * abs(loss) / max(size, 1e-30)
    worst, worst_name = 1.0, ""
    for name, whole, length, *parts in zip(names, together, lengths, *apart, strict=True):
        every = [one for one in (whole, *parts) if one is not None]
        if not every:
            continue
        if len({one.layout for one in every}) > 1:
            every = [one.to_dense() if one.is_sparse else one for one in every]
        first, others = (None, every) if whole is None else (every[0], every[1:])
        total = functools.reduce(torch.add, others) if others else None
        difference = length if total is None else _length(total if first is None else total - first)
        allowed = min(_MOST, _LARGER * tolerance) * (length + sum(map(_length, others)))
        allowed += noise * every[0].numel() ** 0.5 + least
        if difference > worst * allowed:
            worst, worst_name = difference / allowed, name
    if worst_name:
        raise ContractError(
            f"the gradients don't add up over the shards, though the losses do: that of "
            f"{worst_name} for some examples together differs from the sum of those for parts of "
            f"them by more than rounding. Causes: a function whose backward pass compares the "
            f"examples that it gets (divides by their number, or by a norm), or a hook on a "
            f"tensor or a layer that does. Change the batch's gradients in before_update=, or by "
            f"a hook on a parameter, which evenstep calls with the batch's mean. If training is to "
            f"depend on the number of shards: Experiment(separable=False)"
        )


def _typical_size(gradient: torch.Tensor | None, length: float) -> float:
    """Return the root mean square of a gradient of a length; zero if it is not finite."""
    size = 0.0 if gradient is None else length / max(1, gradient.numel()) ** 0.5
    return size if math.isfinite(size) else 0.0


def _length(gradient: Any) -> float:
    numbers = gradient.coalesce().values() if gradient.is_sparse else gradient
    if numbers.dtype is not torch.float32:
        numbers = numbers.to(torch.promote_types(numbers.dtype, torch.float32))
    return float(torch.linalg.vector_norm(numbers))
