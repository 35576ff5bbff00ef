"""Metrics that keep their own state, such as those of torchmetrics, computed shard by shard.

Each shard updates a fresh copy. Its states are merged in the order of the shards, as `reduce_fx` of
each state says, so the result does not depend on which device, or process, has computed a shard.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import optree
import torch

from evenstep.collectives import tree_sum
from evenstep.errors import InputError, ModelError, shown
from evenstep.shard.evaluation import Metric, measure_output

State: TypeAlias = "torch.Tensor | list[torch.Tensor]"
States: TypeAlias = "dict[str, State]"

_REDUCTIONS = {
    "dim_zero_sum": "sum",
    "dim_zero_mean": "mean",
    "dim_zero_max": "max",
    "dim_zero_min": "min",
    "dim_zero_cat": "cat",
}
_PAIRWISE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_HOLDS_NUMBERS = (int, float, complex, list, dict, set, torch.Tensor)


def split_metrics(
    metrics: Mapping[str, Any], measure: Callable[..., Any]
) -> tuple[dict[str, Metric], dict[str, MetricObject]]:
    """Return the metrics that are functions, and those that are objects with states.

    Args:
        metrics: by name; a `MetricCollection` too.
        measure: what calls them for a shard.

    Raises:
        InputError: there is no dict of functions and objects, an object's states can't be merged,
            or the trainer has an objective.
    """
    if isinstance(metrics, type) or not hasattr(metrics, "items"):
        raise InputError(
            f"got a {type(metrics).__name__} as metrics: give a dict, such as "
            f'{{"accuracy": evenstep.metrics.accuracy}}'
        )
    functions: dict[str, Metric] = {}
    objects: dict[str, MetricObject] = {}
    for name, metric in metrics.items():
        if not callable(metric) or isinstance(metric, type):
            raise InputError(
                f'the metric "{name}" is {shown(metric)}: give a function, metric(output, '
                f"*targets) -> (total, count)"
            )
        if not _has_states(metric):
            functions[name] = metric
        elif measure is not measure_output:
            raise InputError(
                f'the metric "{name}" is an object, which is updated with (output, *targets), but '
                f"the trainer has an objective: use trainer.predict, and update it with the result"
            )
        else:
            objects[name] = MetricObject(name, metric)
    return functions, objects


class MetricObject:
    """Updates copies of a metric with the outputs of shards, and merges their states.

    Args:
        name: its name in `evaluate`.
        metric: the user's object, which stays as it is.

    Raises:
        InputError: its states can't be merged.
    """

    def __init__(self, name: str, metric: Any) -> None:
        self._name = name
        self._kind = type(metric).__name__
        inner = [one for one in metric.modules() if one is not metric and _has_states(one)]
        if inner or not metric._reductions:
            found = f"wraps {type(inner[0]).__name__}" if inner else "has no states of its own"
            raise self._refused(f"{found}: give metrics without a wrapper")
        self._reductions = {
            state: self._reduction_of(state, metric._defaults[state], reduce_fx)
            for state, reduce_fx in metric._reductions.items()
        }
        self._template = metric.clone()
        self._template.reset()
        self._copies: list[Any] = []
        self._lock = threading.Lock()
        self._merged: States = {}
        self._count = 0

    def __call__(self, output: Any, *targets: Any) -> States:
        """Return the states after an update with one shard's output; called in a lane."""
        copy = self._copy()
        before = _plain(copy)
        device = next(iter(optree.tree_leaves(output))).device
        if copy.device != device:
            copy.to(device)
        copy.update(output, *targets)
        self._refuse_hidden(before, _plain(copy))
        states = {name: _home(getattr(copy, name)) for name in self._reductions}
        self._copies.append(copy)
        return states

    def add(self, shards: Sequence[States]) -> None:
        """Merge the states of a batch's shards, in their order, with those of earlier batches."""
        for name, reduction in self._reductions.items():
            values = [states[name] for states in shards]
            if name in self._merged:
                values = [self._merged[name], *values]
            self._merged[name] = self._merge(name, reduction, values)
        self._count += len(shards)

    def compute(self) -> Any:
        """Return the metric of everything that was added: a number if it is one."""
        final = self._copies[0] if self._copies else self._template
        final.to("cpu")
        for name, reduction in self._reductions.items():
            value = self._merged[name]
            if reduction == "mean":
                assert isinstance(value, torch.Tensor)
                value = value / self._count
            setattr(final, name, value)
        result = type(final).compute(final)  # without a sum over processes
        is_number = isinstance(result, torch.Tensor) and result.numel() == 1
        return float(result) if is_number else result

    def _merge(self, name: str, reduction: str, values: Sequence[Any]) -> State:
        if reduction == "cat":
            parts = [part for one in values for part in (one if isinstance(one, list) else [one])]
            return (
                parts if isinstance(values[0], list) else torch.cat([*map(torch.atleast_1d, parts)])
            )
        shapes = {tuple(value.shape) for value in values}
        if len(shapes) > 1:
            found = " and ".join(map(str, sorted(shapes)))
            raise ModelError(
                f'the state "{name}" of the metric "{self._name}" has the shapes {found} after '
                f"different shards, which can't be merged: let it have one shape"
            )
        merged = tree_sum([*values], _PAIRWISE[reduction])
        assert isinstance(merged, torch.Tensor)
        return merged

    def _copy(self) -> Any:
        """Return a copy that was not updated: a new one, or that of an earlier shard."""
        with self._lock:
            copy = self._copies.pop() if self._copies else self._template.clone()
        copy.reset()
        return copy

    def _reduction_of(self, state: str, default: Any, reduce_fx: Any) -> str:
        own = getattr(reduce_fx, "__module__", "") == "torchmetrics.utilities.data"
        name = _REDUCTIONS.get(getattr(reduce_fx, "__name__", "")) if own else None
        if isinstance(default, list) and (reduce_fx is None or name == "cat"):
            return "cat"
        if name is None or isinstance(default, list):
            raise self._refused(
                f'its state "{state}" has dist_reduce_fx={reduce_fx!r}: "sum", "mean", "max", '
                f'"min" or "cat" is needed; use trainer.predict, and update it with the result'
            )
        return name

    def _refuse_hidden(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Refuse a metric that counts in attributes that are no states."""
        for name, value in after.items():
            old = before.get(name)
            if name in self._reductions or not isinstance(value, _HOLDS_NUMBERS):
                continue
            if old is not value and (isinstance(value, torch.Tensor) or old != value):
                raise self._refused(
                    f"its update writes the attribute {name}: let it be a state (add_state)"
                )

    def _refused(self, why: str) -> InputError:
        return InputError(
            f'the metric "{self._name}" of type {self._kind} can\'t be merged over shards; {why}'
        )


def _has_states(metric: object) -> bool:
    needed = ("_reductions", "_defaults", "update", "compute", "clone", "reset", "modules")
    return not isinstance(metric, type) and all(hasattr(metric, name) for name in needed)


def _plain(metric: Any) -> dict[str, Any]:
    """Return the attributes of a metric that are not private."""
    return {name: value for name, value in vars(metric).items() if not name.startswith("_")}


def _home(state: State) -> State:
    """Return a state on the CPU, which no later update writes to."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    return [one.detach().cpu() for one in state]
