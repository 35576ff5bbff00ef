"""Metrics that keep their own state, such as those of torchmetrics, updated with whole batches.

What an update gives may depend on all its examples: torchmetrics takes numbers for logits if any of
an update lies outside [0, 1]. So the shards only compute outputs. Joined in their order, these
update each object once for a batch, as in a plain loop, on the CPU of every process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optree
import torch

from evenstep.batch import Batch
from evenstep.batch.cut import Cut, dim_of
from evenstep.batch.rng import ShardRandomness
from evenstep.devices import intra_op_threads
from evenstep.engine.interrupts import interruptible
from evenstep.errors import InputError, ModelError, add_note, shown
from evenstep.shard.evaluation import Metric, dim_of_rows, measure_output
from evenstep.shard.loss import split_batch

_USE_FUNCTIONS = "use functions, metric(output, *targets) -> (total, count), instead of objects"


def split_metrics(
    metrics: Mapping[str, Any], measure: Callable[..., Any]
) -> tuple[dict[str, Metric], dict[str, Any]]:
    """Return the metrics that are functions, and those that are objects with states.

    Args:
        metrics: by name; a `MetricCollection` too.
        measure: what calls them for a shard.

    Raises:
        InputError: there is no dict of functions and objects, or there are objects, and the trainer
            has an objective.
    """
    if isinstance(metrics, type) or not hasattr(metrics, "items"):
        raise InputError(
            f"got a {type(metrics).__name__} as metrics: give a dict, such as "
            f'{{"accuracy": evenstep.metrics.accuracy}}'
        )
    functions: dict[str, Metric] = {}
    objects: dict[str, Any] = {}
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
            objects[name] = metric
    return functions, objects


def collect(output: Any, *targets: Any) -> dict[str, Any]:
    """Return a shard's output and targets on the CPU; called in a lane, like a metric.

    Raises:
        ModelError: the output holds something else than tensors.
    """
    for leaf in optree.tree_leaves(output):
        if not isinstance(leaf, torch.Tensor):
            raise ModelError(
                f"the model returned a {type(leaf).__name__}, but metric objects are updated with "
                f"the outputs of a whole batch, which are tensors with a row for each example: "
                f"{_USE_FUNCTIONS}"
            )
    own = optree.tree_map(lambda leaf: leaf.to("cpu", copy=True), output)  # may be a model's buffer
    on_cpu: Batch = optree.tree_map(torch.Tensor.cpu, targets)  # type: ignore[arg-type]
    return {"output": own, "targets": on_cpu}


class MetricObjects:
    """Copies of metrics, each updated once with every batch.

    Args:
        metrics: the user's objects by name, which stay as they are.
        threads: the number of intra-op threads that they compute with, part of the experiment.
        batch_dim: the dimension that the examples lie along, of tensors that have it.
    """

    def __init__(self, metrics: Mapping[str, Any], threads: int, batch_dim: int) -> None:
        self._copies = {name: _alone(metric.clone()) for name, metric in metrics.items()}
        self._threads = threads
        self._batch_dim = batch_dim

    def update(self, shards: Sequence[Mapping[str, Any]], cut: Cut, seed: int) -> None:
        """Update every object with a batch.

        Args:
            shards: what `collect` returned for each shard, in order.
            cut: the batch. Micro-batches of the user's own update an object one by one.
            seed: of what the objects draw.

        Raises:
            ModelError: an output does not have one row for each example.
        """
        updates = [self._joined(shards, cut)] if cut.can_join else shards
        with self._computing(seed):
            for one in updates:
                for name, metric in self._copies.items():
                    with _noted(f'in the metric "{name}", updated with the whole batch'):
                        interruptible(metric.update, one["output"], *one["targets"])

    def compute(self, seed: int) -> dict[str, Any]:
        """Return each metric of everything that it was updated with: a number if it is one."""
        with self._computing(seed):
            return {name: _computed(name, metric) for name, metric in self._copies.items()}

    def _joined(self, shards: Sequence[Mapping[str, Any]], cut: Cut) -> Mapping[str, Any]:
        sizes = [hi - lo for lo, hi in cut.bounds[: cut.filled]]
        dims = [*dict.fromkeys((self._batch_dim, 0))]

        def rows(*parts: torch.Tensor) -> torch.Tensor:
            with _noted(f"metric objects are updated with whole batches: {_USE_FUNCTIONS}"):
                dim = dim_of_rows(parts, sizes, dims, "the output", _USE_FUNCTIONS)
            return torch.cat(parts, dim)

        def cut_again(is_shared: bool, *parts: torch.Tensor) -> torch.Tensor:
            return parts[0] if is_shared else torch.cat(parts, dim_of(parts[0], self._batch_dim))

        output = optree.tree_map(rows, *[one["output"] for one in shards])
        flags: Batch = _shared_targets(cut)
        targets = optree.tree_map(cut_again, flags, *[one["targets"] for one in shards])
        return {"output": output, "targets": targets}

    @contextlib.contextmanager
    def _computing(self, seed: int) -> Iterator[None]:
        """Inside `with`, the results don't depend on the process's threads or generators."""
        with torch.no_grad(), intra_op_threads(self._threads), ShardRandomness(lambda: seed):
            yield


def _shared_targets(cut: Cut) -> tuple[Any, ...]:
    """Return for each target, in its nesting, whether every shard has got it whole."""
    flags = (number in cut.shared for number in range(cut.structure.num_leaves))
    batch: Batch = cut.structure.unflatten(flags)
    return tuple(split_batch(batch)[1])


def _has_states(metric: object) -> bool:
    needed = ("update", "compute", "clone", "reset", "modules")
    return not isinstance(metric, type) and all(hasattr(metric, name) for name in needed)


def _alone(metric: Any) -> Any:
    """Return a copy without updates, on the CPU, that adds up nothing over processes."""
    metric.to("cpu").reset()
    for one in metric.modules():
        one.sync_on_compute = one._to_sync = False  # every process has all examples
    return metric


def _computed(name: str, metric: Any) -> Any:
    with _noted(f'in the metric "{name}"'):
        result = interruptible(metric.compute)
    is_number = isinstance(result, torch.Tensor) and result.numel() == 1
    return float(result) if is_number else result


@contextlib.contextmanager
def _noted(text: str) -> Iterator[None]:
    """Inside `with`, add a note to an error."""
    try:
        yield
    except Exception as error:
        add_note(error, text)
        raise
