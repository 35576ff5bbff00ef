"""Metrics: means over all examples seen so far. Updating one waits for its arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from evenstep.errors import MXNetError
from evenstep.mxnet.core.array import NDArray

__all__ = [
    "MAE",
    "MSE",
    "RMSE",
    "Accuracy",
    "CompositeEvalMetric",
    "CrossEntropy",
    "EvalMetric",
    "Loss",
    "TopKAccuracy",
    "create",
]


class EvalMetric:
    """A mean; a subclass defines `count(label, pred)`, the total and the number of a batch."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    def reset(self) -> None:
        """Forget what was seen."""
        self.sum_metric, self.num_inst = 0.0, 0

    def count(self, label: np.ndarray[Any, Any], pred: np.ndarray[Any, Any]) -> tuple[float, int]:
        """Return the total and the number of a batch."""
        raise NotImplementedError

    def update(self, labels: Any, preds: Any) -> None:
        """Add batches of labels and predictions: an array, or a list with one for each context."""
        labels, preds = _listed(labels), _listed(preds)
        if labels and len(labels) != len(preds):
            raise MXNetError(f"got {len(labels)} arrays of labels and {len(preds)} of predictions")
        for label, pred in zip(labels or preds, preds, strict=True):
            total, number = self.count(_values(label), _values(pred))
            self.sum_metric += total
            self.num_inst += number

    def get(self) -> tuple[Any, Any]:
        """Return name and value."""
        return self.name, self.sum_metric / self.num_inst if self.num_inst else math.nan

    def get_name_value(self) -> list[tuple[str, float]]:
        """Return pairs of name and value."""
        return [self.get()]


class Accuracy(EvalMetric):
    """The share of predictions, scores or classes, that are the label."""

    def __init__(self, axis: int = 1, name: str = "accuracy") -> None:
        super().__init__(name)
        self._axis = axis

    def count(self, label: Any, pred: Any) -> tuple[float, int]:
        """Return the number of right predictions, and of all."""
        found = pred.argmax(self._axis) if pred.ndim > label.ndim else pred
        if found.shape != label.shape:
            raise MXNetError(f"got labels of shape {label.shape} for predictions {pred.shape}")
        return float((found.astype(np.int64) == label.astype(np.int64)).sum()), label.size


class TopKAccuracy(EvalMetric):
    """The share of labels that are among the `top_k` highest scores."""

    def __init__(self, top_k: int = 1, name: str = "top_k_accuracy") -> None:
        super().__init__(f"{name}_{top_k}")
        self._top_k = top_k

    def count(self, label: Any, pred: Any) -> tuple[float, int]:
        """Return the number of labels among the highest scores, and of all."""
        best = np.argsort(-pred, axis=1, kind="stable")[:, : self._top_k]
        return float((best == label.astype(np.int64).reshape(-1, 1)).any(1).sum()), len(label)


class _Difference(EvalMetric):
    """The mean of a function of the differences."""

    function: Callable[[Any], Any] = np.abs

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name or type(self).__name__.lower())

    def count(self, label: Any, pred: Any) -> tuple[float, int]:
        """Return the sum over all elements, and their number."""
        return float(type(self).function(label.reshape(pred.shape) - pred).sum()), pred.size


class MAE(_Difference):
    """The mean absolute error."""


class MSE(_Difference):
    """The mean squared error."""

    function = np.square


class RMSE(MSE):
    """The root of the mean squared error."""

    def get(self) -> tuple[Any, Any]:
        """Return name and value."""
        name, value = super().get()
        return name, math.sqrt(value)


class CrossEntropy(EvalMetric):
    """The mean cross-entropy of probabilities."""

    def __init__(self, eps: float = 1e-12, name: str = "cross-entropy") -> None:
        super().__init__(name)
        self._eps = eps

    def count(self, label: Any, pred: Any) -> tuple[float, int]:
        """Return the sum over all examples, and their number."""
        chosen = pred[np.arange(len(label)), label.astype(np.int64).reshape(-1)]
        return float(-np.log(chosen + self._eps).sum()), len(label)


class Loss(EvalMetric):
    """The mean of losses; labels are not used: `update(None, losses)`."""

    def __init__(self, name: str = "loss") -> None:
        super().__init__(name)

    def count(self, label: Any, pred: Any) -> tuple[float, int]:
        """Return the sum of losses, and their number."""
        return float(pred.sum()), pred.size


class CompositeEvalMetric(EvalMetric):
    """Several metrics at once."""

    def __init__(self, metrics: Sequence[EvalMetric] = (), name: str = "composite") -> None:
        self.metrics = list(metrics)
        super().__init__(name)

    def add(self, metric: Any) -> None:
        """Add a metric."""
        self.metrics.append(create(metric))

    def reset(self) -> None:
        """Reset all metrics."""
        for metric in self.metrics:
            metric.reset()

    def update(self, labels: Any, preds: Any) -> None:
        """Update all metrics."""
        for metric in self.metrics:
            metric.update(labels, preds)

    def get(self) -> tuple[Any, Any]:
        """Return the names and the values."""
        found = [metric.get() for metric in self.metrics]
        return [name for name, _ in found], [value for _, value in found]

    def get_name_value(self) -> list[tuple[str, float]]:
        """Return pairs of name and value."""
        return [metric.get() for metric in self.metrics]


_NAMED: dict[str, Callable[[], EvalMetric]] = {
    "acc": Accuracy,
    "accuracy": Accuracy,
    "mae": MAE,
    "mse": MSE,
    "rmse": RMSE,
    "loss": Loss,
    "cross-entropy": CrossEntropy,
    "ce": CrossEntropy,
    "top_k_accuracy": TopKAccuracy,
}


def create(metric: Any) -> EvalMetric:
    """Return a metric for itself, its name, or a list of these."""
    if isinstance(metric, EvalMetric):
        return metric
    if isinstance(metric, list | tuple):
        return CompositeEvalMetric([create(one) for one in metric])
    if metric not in _NAMED:
        raise MXNetError(f"got metric {metric!r}: use one of {', '.join(_NAMED)}")
    return _NAMED[metric]()


def _listed(arrays: Any) -> list[Any]:
    if arrays is None:
        return []
    return list(arrays) if isinstance(arrays, list | tuple) else [arrays]


def _values(array: Any) -> Any:
    return array.asnumpy() if isinstance(array, NDArray) else np.asarray(array)
