"""Turns the user's `loss=` or `objective=` into a function that gives a shard's total and count.

A batch's loss is the sum of its shards' totals divided by the sum of their counts. So every example
(or token, or class weight) weighs the same, however the batch is cut.

The backward pass of each shard begins with 1 / (the examples of the batch), which is known before
any shard is computed. Where the counts add up to the examples, as for every loss of torch's without
class weights and ignored targets, gradients have the scale of plain torch's all the way; other sums
of gradients are corrected at the end of the step, by counts / examples.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from evenstep.batch import Batch
from evenstep.batch.advice import whole_in_one
from evenstep.batch.cut import tensors_of
from evenstep.batch.nesting import Keywords
from evenstep.devices import accelerator
from evenstep.engine.interrupts import INTERRUPTS
from evenstep.errors import ModelError, add_note, counted, shown
from evenstep.private_torch.modules import ANY_HOOKS
from evenstep.private_torch.tensors import version_of
from evenstep.shard.partial_sum import HALF_PRECISION
from evenstep.shard.targets import (
    advice_on_order,
    advice_on_targets,
    call_with,
    refuse_unfit_output,
    refuse_weights_of_examples,
)

Number: TypeAlias = "torch.Tensor | float"
Outputs: TypeAlias = "Mapping[str, Any]"
"""What an objective returns besides its loss, by name: tuples (total, count), numbers, or tensors
with a row for each example."""

ShardLoss: TypeAlias = "tuple[torch.Tensor, Number] | tuple[torch.Tensor, Number, Outputs]"
MeanLoss: TypeAlias = "torch.Tensor | tuple[torch.Tensor, Outputs]"

UserObjective: TypeAlias = Callable[..., "ShardLoss | MeanLoss"]
"""`objective(model, *batch)` returns (total, count), or the mean over its examples. Outputs
may follow. Total and mean are scalar tensors that have a graph."""

ShardObjective: TypeAlias = Callable[[nn.Module, Batch, "int | None"], ShardLoss]
"""`(model, batch, examples) -> (total, count)`, or with outputs.

`examples` is the number of examples in the shard. It is None for a shard that is the whole batch:
its total is then the mean and its count 1, so that training with one shard is the plain loop
`loss.backward()`, bit for bit.
"""

Loss: TypeAlias = Callable[..., torch.Tensor]
"""`loss(output, *targets) -> scalar`, the mean over the examples."""


def choose_objective(loss: Loss | None, objective: UserObjective | None) -> ShardObjective:
    """Return the shards' objective for exactly one of a mean-reduced `loss` and an `objective`.

    Raises:
        ModelError: both or neither are given, or the loss is not a function, not a mean, or has
            parameters.
    """
    if (loss is None) == (objective is None):
        raise ModelError(
            f"got {'both loss and objective' if loss else 'neither loss nor objective'}: give "
            f"loss=... (a mean-reduced loss(output, *targets)) or objective=... "
            f"(objective(model, *batch) -> (total, count))"
        )
    if objective is not None:
        return functools.partial(_user_objective, objective)
    assert loss is not None
    _refuse_no_function(loss)
    loss = _as_module(loss)
    _refuse_unfit(loss)
    objective_of = _class_objective if _has_torchs_count(loss) else _mean_objective
    return functools.partial(objective_of, _PlacedLoss(loss))


def _has_torchs_count(loss: Loss) -> bool:
    """Whether a loss divides by the targets that torch counts.

    A subclass with a `forward` of its own, which shifts or masks them, may count others.
    """
    kind: Any = type(loss)
    return (
        isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
        and kind.forward in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)
        and kind.__call__ is nn.Module.__call__
        and "forward" not in vars(loss)
    )


def of_unlike_shards(objective: ShardObjective) -> ShardObjective:
    """Return `objective` for shards whose examples may have different numbers of targets."""
    if getattr(objective, "func", None) is not _class_objective:
        return objective
    settings: Any = {"alike": False}
    return functools.partial(objective, **settings)


class Objectives:
    """The objectives that steps were taken with besides the trainer's own.

    A function that a loop defines anew in each of its turns is one objective: its code tells.
    """

    def __init__(self) -> None:
        self._known = set[object]()

    def is_new(self, objective: UserObjective) -> bool:
        """Whether no step was taken with the objective."""
        return _code_of(objective) not in self._known

    def note(self, objective: UserObjective) -> None:
        """Note that a step was taken with the objective."""
        self._known.add(_code_of(objective))


def _code_of(objective: Any) -> object:
    """Return what two functions of one definition have in common; else the object's own number."""
    function = objective.func if isinstance(objective, functools.partial) else objective
    return getattr(function, "__code__", id(function))


def split_batch(batch: Batch) -> tuple[Sequence[Any], Sequence[Any], Mapping[str, Any]]:
    """Return the model's inputs, the targets, and the model's inputs by name.

    The first part of a batch is an input, further ones are targets; what has a name is an input.
    """
    if not isinstance(batch, tuple | list) or not batch:
        raise ModelError(
            f"loss(output, *targets) needs batches (input, *targets), got a "
            f"{type(batch).__name__}: use objective=... for other batches"
        )
    if isinstance(batch[-1], Keywords):
        return batch[:-1][:1], batch[1:-1], batch[-1]
    return batch[:1], batch[1:], {}


class _PlacedLoss:
    """A loss with a copy of its tensors (class weights) on each GPU.

    The user may change the loss between two steps: then it is copied again.
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self._copies: dict[torch.device, tuple[list[object], Any, torch.Event]] = {}

    def on(self, device: torch.device) -> Any:
        """Return the loss for `device`: the user's own on the CPU, a copy on a GPU.

        Raises:
            ModelError: it is no mean any more.
        """
        loss = self._loss
        if not isinstance(loss, nn.Module):
            return loss
        if "reduction" in loss.__dict__ and loss.reduction in ("sum", "none"):
            _refuse_unfit(loss)
        if device.type == "cpu":
            return loss
        settings = _settings_of(loss)
        known = self._copies.get(device)
        if known is None or not _are_same(known[0], settings):
            placed = copy.deepcopy(loss).to(device)
            known = self._copies[device] = settings, placed, accelerator.fence_here(device)
        accelerator.wait_here(known[2], device)  # another lane of the device may have copied it
        return known[1]


def _settings_of(loss: nn.Module) -> list[object]:
    """Return what a copy of a loss has taken over: its attributes, and the state of its tensors."""
    settings: list[object] = []
    for module in loss.modules():
        settings += [value for name, value in vars(module).items() if not name.startswith("_")]
        for buffer in module.buffers(recurse=False):
            settings += [buffer, version_of(buffer)]
    return settings


def _are_same(first: list[object], second: list[object]) -> bool:
    """Whether two lists hold the same objects, or equal numbers and words."""
    return len(first) == len(second) and all(
        one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)
        for one, other in zip(first, second, strict=True)
    )


_PLAIN = int, float, str


@INTERRUPTS.interruptible
def _user_objective(
    objective: UserObjective, model: nn.Module, batch: Batch, examples: int | None
) -> ShardLoss:
    unnamed, named = (batch[:-1], batch[-1]) if isinstance(batch[-1], Keywords) else (batch, {})

    def how() -> str:
        names = f" and {', '.join(named)} by name" if named else ""
        parts = counted(len(unnamed), "part")
        return f"the objective as objective(model, *batch), with {parts} of a batch{names}"

    result = call_with(how, objective, model, *unnamed, **named)
    match result:
        case torch.Tensor() as mean:
            return _of_mean(mean, "the objective's mean", examples)
        case list():
            pass  # of losses, perhaps: only tuples are pairs
        case (mean, Mapping() as outputs):
            return *_of_mean(mean, "the objective's mean", examples), checked_outputs(outputs)
        case (total, count, *outputs) if len(outputs) < 2:
            _check_scalar(total, "the objective's total")
            if isinstance(count, torch.Tensor) and count.requires_grad:
                raise _learned_count_error()
            if examples is None:
                total, count = total / count, _count_of_mean(count)
            return (total, count, checked_outputs(outputs[0])) if outputs else (total, count)
    got = f"a list, {shown(result)}" if isinstance(result, list) else shown(result)
    raise ModelError(
        f"the objective returned {got}: the tuple (total, count) is needed, or the mean over the "
        f"examples; a dict of outputs may follow"
    )


def _of_mean(mean: Any, what: str, examples: int | None) -> tuple[torch.Tensor, Number]:
    """Return the total and the count of a mean over the examples of a shard.

    A mean in half precision is widened first: the total may be too large for it.
    """
    _check_scalar(mean, what)
    if examples is None:
        return mean, 1
    return (mean.float() if mean.dtype in HALF_PRECISION else mean) * examples, examples


def _learned_count_error() -> ModelError:
    return ModelError(
        "the objective returned a count that requires a gradient, but gradients flow through the "
        "total only: the shards' gradients are divided by the sum of the counts. If the count is "
        "meant as a constant, return count.detach(). If it is to be trained (weights that the "
        "model normalises), gather both sums from all shards and return their ratio as the mean: "
        "up, down = evenstep.all_gather(torch.stack([total, count])[None]).sum(0); return up / "
        "down, with Layout(side_by_side=True)"
    )


def checked_outputs(outputs: object) -> Outputs:
    """Return the outputs of an objective.

    Raises:
        ModelError: they are no dict, or a value is neither a tensor nor a number nor a pair.
    """
    if not isinstance(outputs, Mapping):
        raise ModelError(
            f"the objective returned {shown(outputs)} as its outputs: a dict is needed, such as "
            f'{{"kl": (total, count)}}'
        )
    for name, value in outputs.items():
        parts = value if isinstance(value, tuple) and len(value) == 2 else [value]
        if isinstance(value, list):
            raise ModelError(
                f"the objective returned a list, {shown(value)} as the output {name!r}: a row for "
                f"each example is torch.tensor(...) of it, a pair is the tuple (total, count)"
            )
        if not isinstance(name, str) or not all(map(_is_number, parts)):
            raise ModelError(
                f"the objective returned {shown(value)} as the output {name!r}: a pair (total, "
                f"count) is needed, a number, or a tensor with a row for each example"
            )
    return outputs


def _is_number(value: object) -> bool:
    return isinstance(value, torch.Tensor | int | float)


def _count_of_mean(count: Number) -> Number:
    """Return 1 for a count that can be divided by; else the count, which the step refuses."""
    if isinstance(count, torch.Tensor):
        return torch.where(torch.isfinite(count) & (count > 0), 1.0, count)
    return 1 if 0 < count < math.inf else count


@INTERRUPTS.interruptible
def _mean_objective(
    loss: _PlacedLoss, model: nn.Module, batch: Batch, examples: int | None
) -> tuple[torch.Tensor, Number]:
    inputs, targets, named = split_batch(batch)
    output = model(*inputs, **named)
    placed = loss.on(tensors_of(batch)[0].device)
    refuse_unfit_output(placed, output, targets)
    if examples is not None:
        refuse_weights_of_examples(placed, output, examples)

    def how() -> str:
        count = counted(len(targets), "target")
        return (
            f"the loss as loss(output, *targets), with {count} (what takes (model, *batch) is "
            f"given as objective=...)"
        )

    try:
        mean = call_with(how, placed, output, *targets)
    except (RuntimeError, ValueError) as error:
        with contextlib.suppress(Exception):  # the error is what matters
            advice = advice_on_targets(placed, output, targets)
            if advice := advice or advice_on_order(placed, output, targets):
                add_note(error, advice)
        raise
    return _of_mean(mean, "the loss", examples)


@INTERRUPTS.interruptible
def _class_objective(
    placed: _PlacedLoss,
    model: nn.Module,
    batch: Batch,
    examples: int | None,
    *,
    alike: bool = True,
) -> tuple[torch.Tensor, Number]:
    """Return a shard's (total, count), both for each example.

    An example may have several targets, such as tokens or pixels. If all examples have as many
    (`alike`), total and count are divided by that number, so that counts add up to examples.
    """
    inputs, targets, named = split_batch(batch)
    if len(targets) != 1:
        names = f", of which {', '.join(named)} go to the model" if named else ""
        parts = len(inputs) + len(targets) + len(named)
        raise ModelError(
            whole_in_one(batch)
            or f"cross entropy and NLL take (output, target), got a batch of "
            f"{counted(parts, 'part')}{names}: give trainer.step(X, y), or use objective=... for "
            f"other batches"
        )
    target = targets[0]
    output = model(*inputs, **named)
    if not isinstance(output, torch.Tensor):
        refuse_unfit_output(placed.on(target.device), output, targets)
    loss = placed.on(output.device)
    try:
        if examples is None and not (output.ndim > 2 and _has_random_sum(output, target)):
            return loss(output, target), 1
        if output.dtype in HALF_PRECISION and loss.weight is None:
            output = output.float()
        sums = _class_sums(loss, output, target, examples if alike else None)
        return (sums[0] / sums[1], 1) if examples is None else sums
    except (RuntimeError, IndexError, ValueError) as error:
        with contextlib.suppress(Exception):  # the error is what matters
            if (advice := _advice_on_labels(output, target, loss.ignore_index)) is not None:
                add_note(error, advice)
        raise


def _class_sums(
    loss: nn.CrossEntropyLoss | nn.NLLLoss,
    output: torch.Tensor,
    target: torch.Tensor,
    examples: int | None,
) -> tuple[torch.Tensor, Number]:
    """Return the sum of what `loss` averages, and the sum of the class weights it divides by.

    The loss is taken with the settings that it has now. Both sums are divided by the number of
    targets, counted or not, that each of the `examples` has; they are left if that is None.
    """
    weight, ignored = loss.weight, loss.ignore_index
    count: Number
    if target.is_floating_point():  # class probabilities: a mean over positions
        count = targets = output.numel() // output.shape[1]
    else:
        counted, targets = target != ignored, target.numel()
        weights = counted if weight is None else weight[torch.where(counted, target, 0)]
        count = counted.sum() if weight is None else torch.where(counted, weights, 0.0).sum()
    before, around, behind = ANY_HOOKS
    hooked = getattr(loss, before) or getattr(loss, around) or getattr(loss, behind)
    total: torch.Tensor
    if hooked and count:  # hooks get the mean, as without evenstep
        total = loss(output, target) * count
    else:
        is_apart = output.ndim > 2 and _has_random_sum(output, target)
        reduction = "none" if is_apart else "sum"
        if isinstance(loss, nn.NLLLoss):
            total = F.nll_loss(output, target, weight, ignore_index=ignored, reduction=reduction)
        else:
            rest = weight, None, ignored, None, reduction, loss.label_smoothing
            total = F.cross_entropy(output, target, *rest)
        total = total.sum() if is_apart else total
    if examples is None or targets == examples:
        return total, count
    return total / (targets // examples), count / (targets // examples)


def _has_random_sum(output: torch.Tensor, target: torch.Tensor) -> bool:
    """Return whether torch's kernel adds up the losses of labels in an order of its own each time.

    For labels of pixels or tokens, that on GPUs does. Torch refuses it where algorithms have to be
    deterministic, but gives the loss of each label.
    """
    has_labels = not target.is_floating_point()
    return has_labels and accelerator.adds_losses_in_any_order(output.device)


def _advice_on_labels(output: torch.Tensor, target: torch.Tensor, ignore_index: int) -> str | None:
    """Return what is wrong with labels that cross entropy has refused; None if it is not known."""
    numbers = "cross entropy takes numbers of classes, so give y.long()"
    classes = output.shape[1]
    if target.shape[1:] == (1,) and output.ndim == 2 and classes > 1:
        return (
            "the labels are of shape (examples, 1): cross entropy takes one number for each "
            "example, so give y.squeeze(1)"
        )
    if target.ndim == output.ndim - 1:
        if target.dtype is not torch.int64:
            return f"the labels are {target.dtype}: {numbers}"
        outside = target[((target < 0) | (target >= classes)) & (target != ignore_index)]
        return (
            f"a label is {int(outside[0])}, but the model gives {classes} classes, 0 to "
            f"{classes - 1}: number the labels from 0, or give the model a larger last layer"
        )
    if output.ndim == target.ndim == 2:
        if target.shape[1] != classes:
            return (
                f"the labels have {target.shape[1]} columns, but the model gives {classes} "
                f"classes: use one number of classes"
            )
        return f"the one-hot labels are {target.dtype}: give y.argmax(1), or y.float()"
    return None


def _as_module(loss: Loss) -> Loss:
    """Turn `F.cross_entropy` and `F.nll_loss`, alone or in a partial, into their modules."""
    function, settings = loss, {}
    if isinstance(loss, functools.partial) and not loss.args:
        function, settings = loss.func, loss.keywords
    if function is F.cross_entropy:
        return nn.CrossEntropyLoss(**settings)
    if function is F.nll_loss:
        return nn.NLLLoss(**settings)
    return loss


def _refuse_no_function(loss: object) -> None:
    if isinstance(loss, type):
        name = loss.__name__
        raise ModelError(f"got the class {name} as loss: give an object of it, such as {name}()")
    if not callable(loss):
        raise ModelError(
            f"got loss={shown(loss)}: give a function or a module, such as nn.CrossEntropyLoss()"
        )


def _refuse_unfit(loss: Loss) -> None:
    settings = loss.keywords if isinstance(loss, functools.partial) else {}
    reduction = getattr(loss, "reduction", settings.get("reduction", "mean"))
    if reduction in ("sum", "none"):
        raise ModelError(
            f"got a loss with reduction={reduction!r}, but loss= needs a mean: leave reduction "
            f"out, or write objective=lambda model, X, y: (total, count) with the sum over the "
            f"shard as total and what to divide by (such as len(y)) as count"
        )
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise ModelError(
            f"the loss {type(loss).__name__} has parameters: make it a part of the model and use "
            f"objective=lambda model, X, y: (total, count)"
        )


def _check_scalar(value: object, what: str) -> None:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        got = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise ModelError(
            f"{what} is {got}, but a scalar tensor is needed: loss= takes a mean over the "
            f"examples, objective= returns (total, count)"
        )
