"""Whether an objective adds up over shards: two together must give what they give apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from evenstep.batch import Batch
from evenstep.contract.constant_numbers import ConstantNumbers
from evenstep.errors import ContractError
from evenstep.experiment import autocast
from evenstep.replicas import Replica
from evenstep.shard.evaluation import evaluation_mode
from evenstep.shard.forward_backward import ShardWork
from evenstep.shard.loss import ShardObjective

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative; 0.03 for narrower dtypes
_ABSOLUTE = 0.01  # of the tolerance, for each counted example: totals may cancel to zero


class Loss(NamedTuple):
    """A shard's total, and the count that it is divided by."""

    total: float
    divisor: float


def judge_separability(
    replica: Replica,
    work: ShardWork,
    pair: Sequence[tuple[Batch, int]],
    objective: ShardObjective,
) -> str:
    """Compute two shards together and apart, in evaluation mode, and compare within rounding.

    Random ops give constants meanwhile.

    Returns:
        Why it could not be judged; an empty text if the objective adds up.

    Raises:
        ContractError: the objective doesn't add up over the shards.
    """
    losses, numbers = [], ConstantNumbers()
    autocasting = autocast(replica.device.kind, work.precision)
    try:
        with evaluation_mode(replica.module), autocasting, numbers:
            for batch, examples in pair:
                if replica.buffers:
                    replica.changed_buffers()
                    replica.open_shard()
                total, count = objective(replica.module, batch, examples)
                losses.append(Loss(float(total.detach()), float(count)))
    except Exception as error:  # the model may not be made for evaluation mode
        return f"in evaluation mode it raises {type(error).__name__}: {error}"
    if numbers.unknown:
        return f"in evaluation mode it draws random numbers by {numbers.unknown[0]}"
    tolerance = _tolerance(total.dtype, work.precision)
    together, *apart = losses
    if not _adds_up(together, apart, tolerance):
        raise ContractError(_explain(together, apart, pair[0][1]))
    return ""


def _tolerance(dtype: torch.dtype, precision: torch.dtype | None) -> float:
    return 0.03 if precision is not None else _TOLERANCE.get(dtype, 0.03)


def _adds_up(together: Loss, apart: Sequence[Loss], tolerance: float) -> bool:
    for ours, parts in zip(together, zip(*apart, strict=True), strict=True):
        scale = sum(map(abs, parts)) + _ABSOLUTE * abs(together.divisor)
        if abs(ours - sum(parts)) > tolerance * scale:
            return False
    return True


def _explain(together: Loss, apart: Sequence[Loss], examples: int) -> str:
    first, second = apart
    text = (
        f"the loss does not add up over the shards: {examples} examples together give the total "
        f"{together.total:.7g} and the count {together.divisor:.7g}, in two shards "
        f"{first.total:.7g} + {second.total:.7g} and {first.divisor:.7g} + {second.divisor:.7g}. "
    )
    if together.divisor == first.divisor == second.divisor:
        return text + (
            "The count is the same for any number of examples: return the sum over the examples "
            "and their number as (total, count), instead of a mean and 1"
        )
    return text + (
        "Causes: a mean in the total or a count that it was not divided by (class weights, "
        "ignored or padded tokens: return their sum and what it is to be divided by); a loss that "
        "compares the examples of a batch with each other (evenstep.all_gather); a tensor for all "
        "shards that was cut like examples (evenstep.shared); examples that don't lie along the "
        "first dimension (Trainer(batch_dim=...)). If training is to depend on the number of "
        "shards: Trainer(separable=False)"
    )
