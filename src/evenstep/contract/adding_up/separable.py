"""Whether an objective adds up over shards: two together must give what they give apart."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from evenstep.batch import Batch
from evenstep.batch.cut import tensors_of
from evenstep.batch.rng import ShardRandomness, watched_generators
from evenstep.contract.adding_up.constant_numbers import ConstantNumbers
from evenstep.contract.adding_up.gradients import Gradients, gradients_of, refuse_other_sum
from evenstep.engine.task import is_device_failure
from evenstep.errors import ContractError, EvenstepError, text_of
from evenstep.options.experiment import autocast
from evenstep.private_torch.modules import BatchNorm
from evenstep.replicas import Replica
from evenstep.replicas.buffer_rules import switches_of_observers
from evenstep.shard.evaluation import evaluation_mode
from evenstep.shard.forward_backward import ShardWork
from evenstep.shard.lockstep import shard_here
from evenstep.shard.loss import ShardObjective

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}  # relative
_TOLERANCE_OF_NARROW = 0.03  # bfloat16 and narrower
_TOLERANCE_WITH_TF32 = 0.01  # GPUs may multiply float32 with ten bits
_ABSOLUTE = 0.1  # of the tolerance, for each counted example: totals may cancel to zero


class Loss(NamedTuple):
    """A shard's total, the count that it is divided by, and its gradients if they are compared."""

    total: float
    divisor: float
    dtype: torch.dtype
    gradients: Gradients | None


@dataclasses.dataclass(frozen=True)
class Neighbours:
    """Shards of which each is compared with the next.

    If all such pairs add up, every example counts alike in all of them.

    Attributes:
        shards: their numbers, two or more; fewer if there is nothing to compare.
        take: returns some of them together as one batch, with its number of examples.
    """

    shards: Sequence[int]
    take: Callable[[Sequence[int]], tuple[Batch, int]]


def judge_separability(
    replica: Replica,
    work: ShardWork,
    neighbours: Neighbours,
    objective: ShardObjective,
    *,
    compares_gradients: bool,
) -> str:
    """Compute shards together and apart, in evaluation mode, and compare within rounding.

    Random ops give constants meanwhile. Gradients are compared for the first two shards.

    Returns:
        Why it could not be judged; an empty text if the objective adds up.

    Raises:
        ContractError: the objective doesn't add up over the shards.
    """
    _refuse_scaled_by_frequency(replica.module)
    numbers = ConstantNumbers()
    compute = functools.partial(
        _compute_pairs,
        replica,
        work,
        neighbours,
        objective,
        compares_gradients=compares_gradients,
    )
    try:
        try:
            found = compute()
        except _DrawnError:
            found = compute(numbers)
    except _OneAtATimeError:
        raise
    except Exception as error:  # the model may not be made for evaluation mode
        if is_device_failure(error):
            raise
        return f"in evaluation mode it raises {type(error).__name__}: {text_of(error)}"
    if numbers.unknown:
        return f"in evaluation mode it draws random numbers by {numbers.unknown[0]}"
    for together, apart, examples in found:
        tolerance = _tolerance(replica, work, together.dtype)
        if not _adds_up(together, apart, tolerance):
            raise ContractError(_explain(together, apart, examples))
        gradients = [one.gradients for one in apart if one.gradients is not None]
        if together.gradients is not None and len(gradients) == len(apart):
            loss = together.total / work.divisor
            refuse_other_sum(replica, together.gradients, gradients, tolerance, loss=loss)
    return ""


def _compute_pairs(
    replica: Replica,
    work: ShardWork,
    neighbours: Neighbours,
    objective: ShardObjective,
    numbers: ConstantNumbers | None = None,
    *,
    compares_gradients: bool,
) -> Sequence[tuple[Loss, Sequence[Loss], int]]:
    """Compute neighbouring shards together and apart; return with both how many examples they have.

    `numbers` stands for random numbers. It looks at each op, so it is left out where none is drawn.

    Raises:
        _DrawnError: a shard has drawn random numbers, and no `numbers` were given.
    """
    randomness, given = ShardRandomness(work.random_seed), list[torch.Generator]()

    def note(generator: torch.Generator, run: Callable[[], Any]) -> Any:
        given.append(generator)
        return run()

    def refuse_drawn() -> None:
        if numbers is None and (given or randomness.has_drawn):
            raise _DrawnError

    def compute(batch: Batch, examples: int, *, learns: bool = False) -> Loss:
        if replica.buffers:
            replica.put_back_buffers()
            replica.open_shard()
        try:
            total, count, *_ = objective(replica.module, batch, examples)
            gradients = gradients_of(replica, total, work.divisor) if learns else None
        except Exception:
            refuse_drawn()
            raise
        refuse_drawn()
        return Loss(float(total.detach()), float(count), total.dtype, gradients)

    found: list[tuple[Loss, Sequence[Loss], int]] = []
    known: dict[int, Loss] = {}
    with (
        evaluation_mode(replica.module),
        _fixed_statistics(replica),
        autocast(replica.device.kind, work.precision),
        watched_generators(note),
        randomness,
        numbers or contextlib.nullcontext(),
    ):
        for two in itertools.pairwise(neighbours.shards):
            learns = compares_gradients and not found
            batch, examples = neighbours.take(two)
            computed = functools.partial(compute, learns=learns)
            together = _computed_together(computed, batch, examples, neighbours, two)
            apart: Sequence[Loss] = _computed_apart(computed, neighbours, two, known)
            found.append((together, apart, examples))
            if not known:  # shards that gather may number their rows from the first shard on
                break
    return found


class _DrawnError(EvenstepError):
    """A shard has drawn random numbers."""


class _OneAtATimeError(ContractError):
    """Each of two examples gives a loss alone, but not both together."""


def _computed_together(
    compute: Callable[[Batch, int], Loss],
    batch: Batch,
    examples: int,
    neighbours: Neighbours,
    shards: Sequence[int],
) -> Loss:
    """Compute two shards as one batch; explain an error if each of two examples works alone."""
    try:
        return compute(batch, examples)
    except (RuntimeError, IndexError) as error:
        if is_device_failure(error) or examples > len(shards):
            raise
        _computed_apart(compute, neighbours, shards, {})  # raises if they don't work alone, either
        raise _OneAtATimeError(
            f"each of two examples gives a loss alone, but both together raise "
            f"{type(error).__name__}: {text_of(error)}. If a tensor that every shard needs whole, "
            f"such as class weights, was cut like examples, give it as evenstep.shared(tensor). If "
            f"the code takes one example at a time: Experiment(separable=False)"
        ) from error


def _refuse_scaled_by_frequency(module: nn.Module) -> None:
    """Refuse gradients that are divided by how often an index occurs in a shard, not the batch."""
    for name, child in module.named_modules():
        if getattr(child, "scale_grad_by_freq", False):
            raise ContractError(
                f"the gradients of {name or type(child).__name__} don't add up over the shards, "
                f"since scale_grad_by_freq=True divides them by the frequencies in each shard: "
                f"leave it out. If training is to depend on the number of shards: "
                f"Experiment(separable=False)"
            )


@contextmanager
def _fixed_statistics(replica: Replica) -> Iterator[None]:
    """Inside `with`, batch normalisation without running statistics has fixed ones.

    Otherwise it would normalise by those of the shard in evaluation mode too. Layers that quantise
    by the range of the shard have the range at the opening of the step.
    """
    switches, opening = switches_of_observers(replica.module), replica.opening
    if switches:
        pairs = zip(replica.buffer_names, opening, strict=True)
        replica.opening = [
            torch.zeros_like(one) if name in switches else one for name, one in pairs
        ]
    layers = [
        module
        for module in replica.module.modules()
        if isinstance(module, BatchNorm) and module.running_mean is None
    ]
    for layer in layers:
        like = replica.parameters[0] if layer.weight is None else layer.weight
        layer.running_mean = like.new_zeros(layer.num_features)
        layer.running_var = like.new_ones(layer.num_features)
    try:
        yield
    finally:
        replica.opening = opening
        for layer in layers:
            layer.running_mean = layer.running_var = None


def _computed_apart(
    compute: Callable[[Batch, int], Loss],
    neighbours: Neighbours,
    shards: Sequence[int],
    known: dict[int, Loss],
) -> list[Loss]:
    """Compute shards one after the other; again after each call of `all_gather` that they make.

    A call needs the rows of all shards, which are known when every shard has come to it. Losses of
    shards that have gathered nothing are put into `known`, by number, and not computed again.
    """
    gathered: list[torch.Tensor] = []
    while True:
        gatherings = {shard: _Gathering(gathered) for shard in shards if shard not in known}
        losses = {shard: known[shard] for shard in shards if shard in known}
        for shard, gathering in gatherings.items():
            outside = shard_here.set(shard_here.get() or gathering)
            try:
                losses[shard] = compute(*neighbours.take([shard]))
            except _RowsMissingError:
                pass
            finally:
                shard_here.reset(outside)
        found = [losses[shard] for shard in shards if shard in losses]
        if len(found) == len(shards):
            if gathered:  # the gradients of rows that others have gathered are missing
                return [loss._replace(gradients=None) for loss in found]
            known.update(losses)
            return found
        if len(gatherings) == len(shards):
            gathered.append(torch.cat([one.brought[len(gathered)] for one in gatherings.values()]))
        known.clear()


class _Gathering:
    """Gives a shard the rows that all shards have brought to each call of `all_gather` before."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        self._known = known
        self.brought: list[torch.Tensor] = []

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all shards; raise if other shards have not come here yet."""
        self.brought.append(rows.detach())
        if len(self.brought) > len(self._known):
            raise _RowsMissingError
        return self._known[len(self.brought) - 1]


class _RowsMissingError(EvenstepError):
    """A shard has reached a call of `all_gather` that the other shards have not reached yet."""


def _tolerance(replica: Replica, work: ShardWork, total: torch.dtype) -> float:
    """Return the relative rounding to allow for: that of the narrowest numbers in the model."""
    if work.precision is not None:
        return _TOLERANCE_OF_NARROW
    tensors = [*replica.parameters, *replica.buffers, *tensors_of(work.batch)]
    kinds = {total, *(one.dtype for one in tensors if one.is_floating_point())}
    exact = max(_TOLERANCE.get(kind, _TOLERANCE_OF_NARROW) for kind in kinds)
    return max(exact, _TOLERANCE_WITH_TF32) if replica.device.is_accelerator else exact


def _adds_up(together: Loss, apart: Sequence[Loss], tolerance: float) -> bool:
    """Whether losses add up; one that is not finite together is left to the step, which says so."""
    if not (math.isfinite(together.total) and math.isfinite(together.divisor)):
        return True
    totals, divisors = [shard.total for shard in apart], [shard.divisor for shard in apart]
    for ours, parts in ((together.total, totals), (together.divisor, divisors)):
        scale = sum(map(abs, parts)) + _ABSOLUTE * abs(together.divisor)
        if not abs(ours - sum(parts)) <= tolerance * scale:  # a mean of nothing is NaN
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
        "first dimension (Experiment(batch_dim=...)). If training is to depend on the number of "
        "shards: Experiment(separable=False)"
    )
