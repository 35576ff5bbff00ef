"""Computes metrics (as exact totals and counts) and predictions, shard by shard."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import optree
import torch
from torch import nn

from evenstep.batch import Batch
from evenstep.batch.rng import ShardRandomness
from evenstep.engine.interrupts import INTERRUPTS, interruptible
from evenstep.errors import ModelError, counted, shown
from evenstep.options.experiment import autocast
from evenstep.replicas import Replica
from evenstep.shard.forward_backward import ShardWork
from evenstep.shard.loss import Number, split_batch
from evenstep.shard.targets import call_with

Metric: TypeAlias = Callable[..., "tuple[Number, Number]"]
"""`metric(output, *targets) -> (total, count)`; with an objective, `metric(model, *batch)`."""

Forward: TypeAlias = Callable[..., Batch]
"""`forward(model, *batch) -> output`: a tensor or a tree of tensors, with a row per example."""

COLLECTED = "\0outputs"
"""The name of what collects outputs for metrics that are objects; no metric of a user has it."""

Pairs: TypeAlias = dict[str, tuple[Number, Number]]
Measure: TypeAlias = Callable[[nn.Module, Batch, Mapping[str, Metric]], Pairs]


@INTERRUPTS.interruptible
def measure_output(model: nn.Module, batch: Batch, metrics: Mapping[str, Metric]) -> Pairs:
    """Call every metric with the output of one forward pass, and the targets."""
    inputs, targets, named = split_batch(batch)
    output = model(*inputs, **named)
    return {
        name: _pair(name, _call(name, metric, output, "output", targets, "target"))
        for name, metric in metrics.items()
    }


@INTERRUPTS.interruptible
def measure_model(model: nn.Module, batch: Batch, metrics: Mapping[str, Metric]) -> Pairs:
    """Call every metric with the model and the batch, as an objective is called."""
    return {
        name: _pair(name, _call(name, metric, model, "model", batch, "part"))
        for name, metric in metrics.items()
    }


def _call(name: str, metric: Metric, first: Any, what: str, others: Batch, kind: str) -> Any:
    """Return what a metric returns for an output and targets, or for a model and a batch."""

    def how() -> str:
        rest = "targets" if kind == "target" else "batch"
        return f'the metric "{name}" as metric({what}, *{rest}), with {counted(len(others), kind)}'

    return call_with(how, metric, first, *others)


def _pair(name: str, value: Any) -> tuple[Number, Number]:
    """Return what a metric has returned: (total, count), or what `COLLECTED` has collected.

    Raises:
        ModelError: it is neither.
    """
    is_pair = isinstance(value, tuple) and len(value) == 2 and all(map(_is_one_number, value))
    if is_pair or name == COLLECTED:
        return cast("tuple[Number, Number]", value)
    raise ModelError(
        f'the metric "{name}" returned {_described(value)}: return the pair (total, count) over '
        f"the examples that the metric is given, two numbers such as ((output.argmax(1) == "
        f"y).sum(), len(y)), from which the mean over all batches follows"
    )


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if type(value) is tuple:
        return f"({', '.join(map(_described, value))})"
    return shown(value)


def _is_one_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return hasattr(type(value), "__float__")  # also numpy's


def measure_shard(
    replica: Replica, work: ShardWork, measure: Measure, metrics: Mapping[str, Metric]
) -> Pairs:
    """Return each metric's (total, count) for one shard; the model is not changed."""
    with _undisturbed(replica, work):
        return measure(replica.module, work.batch, metrics)


def output_of(model: nn.Module, *batch: Batch, **named: Batch) -> Batch:
    """Return the output for a batch's first part, as `loss(output, *targets)` gets it.

    Of a batch with names, the model gets those that its `forward` takes.
    """
    taken = _taken_by(model.forward, named)
    output: Batch = model(**taken) if taken else model(named or batch[0])
    return output


def _taken_by(function: Callable[..., Any], named: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments that a function takes by name; none if it needs others too."""
    try:
        signature = inspect.signature(function)
        kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
        if inspect.Parameter.VAR_KEYWORD in kinds.values():
            taken = dict(named)
        else:
            taken = {name: value for name, value in named.items() if name in kinds}
        signature.bind(**taken)
    except (TypeError, ValueError):
        return {}
    return taken


def _forwarded(forward: Forward, model: nn.Module, batch: Batch) -> Batch:
    """Return the output for a shard, of which `forward` gets the parts by name if it takes them."""
    if len(batch) == 1 and isinstance(batch[0], Mapping):
        with_model = functools.partial(forward, model)
        if len(_taken_by(with_model, batch[0])) == len(batch[0]):
            return with_model(**batch[0])
    return forward(model, *batch)


def predict_shard(replica: Replica, work: ShardWork, forward: Forward) -> Batch:
    """Return the output for one shard, on the CPU; the model is not changed.

    Raises:
        ModelError: the output holds something else than tensors.
    """
    with _undisturbed(replica, work):
        output = interruptible(_forwarded, forward, replica.module, work.batch)
        for leaf in optree.tree_leaves(output):
            if not isinstance(leaf, torch.Tensor):
                raise ModelError(
                    f"the output for {work.examples or 'all'} examples is a {type(leaf).__name__}: "
                    f"predict needs tensors with a row for each example"
                )
        return optree.tree_map(torch.Tensor.cpu, output)


def join_outputs(outputs: Sequence[Batch], examples: Sequence[int], dims: Sequence[int]) -> Batch:
    """Join the outputs of shards along the dimension that their examples lie along.

    Args:
        outputs: the output of each shard, of one nesting.
        examples: the number of examples of each shard.
        dims: the dimensions that the examples may lie along.

    Raises:
        ModelError: in none of `dims`, or in several, does every output have a row for each example.
    """
    return optree.tree_map(
        lambda *rows: torch.cat(rows, dim_of_rows(rows, examples, dims, "the output")),
        *outputs,
    )


def dim_of_rows(
    rows: Sequence[torch.Tensor],
    examples: Sequence[int],
    dims: Sequence[int],
    what: str,
    fix: str = "tell predict which by dim={} or dim={}",
) -> int:
    """Return the dimension along which outputs of shards have a row for each example.

    Args:
        rows: the output of each shard.
        examples: the number of examples of each shard.
        dims: the dimensions that the examples may lie along.
        what: the output, in words.
        fix: what to do if there are two such dimensions.

    Raises:
        ModelError: there is no such dimension, or there are several.
    """
    fitting = [*dims]
    for tensor, size in zip(rows, examples, strict=True):
        shape = tuple(tensor.shape)
        fitting = [dim for dim in fitting if shape[dim : dim + 1] == (size,)]
        if not fitting:
            where = " or ".join(f"along dimension {dim}" for dim in dims)
            raise ModelError(
                f"{what} for {size} examples is of shape {shape}: tensors with a row for each "
                f"example{f' {where}' if any(dims) else ''} are needed"
            )
    if len(fitting) > 1:
        raise ModelError(
            f"the examples of {what}, of shape {tuple(rows[0].shape)}, may lie along dimension "
            f"{fitting[0]} or {fitting[1]}: {fix.format(*fitting)}"
        )
    return fitting[0]


@contextmanager
def _undisturbed(replica: Replica, work: ShardWork) -> Iterator[None]:
    """Inside `with`, compute a shard without gradients; restore the buffers at the end."""
    replica.open_shard()
    randomness = ShardRandomness(work.random_seed)
    try:
        with torch.no_grad(), randomness, autocast(replica.device.kind, work.precision):
            yield
    finally:
        replica.put_back_buffers()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Inside `with`, put `model` into evaluation mode; restore every module's mode at the end."""
    modes = {module: module.training for module in model.modules()}

    def restore() -> None:
        for module, training in modes.items():
            module.training = training

    try:
        model.eval()
        yield
    finally:
        try:
            restore()
        except BaseException:  # maybe thrown into this thread, and has cut that off
            restore()
            raise
