"""Losses of Gluon: functions of predictions and labels that return a number for each example."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def _weighted(loss: Tensor, sample_weight: Tensor | None, weight: float | None) -> Tensor:
    """Return the mean of each example's loss (n, ...), times the weights."""
    if sample_weight is not None:
        loss = loss * sample_weight
    if weight is not None and weight != 1:
        loss = loss * weight
    return loss.flatten(1).mean(1) if loss.ndim > 1 else loss


def l2(
    pred: Tensor, label: Tensor, sample_weight: Tensor | None = None, weight: float | None = 1.0
) -> Tensor:
    """Return half the squared differences."""
    return _weighted((label.reshape(pred.shape) - pred).square() / 2, sample_weight, weight)


def l1(
    pred: Tensor, label: Tensor, sample_weight: Tensor | None = None, weight: float | None = None
) -> Tensor:
    """Return the absolute differences."""
    return _weighted((label.reshape(pred.shape) - pred).abs(), sample_weight, weight)


def huber(
    pred: Tensor,
    label: Tensor,
    sample_weight: Tensor | None = None,
    weight: float | None = None,
    rho: float = 1.0,
) -> Tensor:
    """Return MXNet's Huber loss: squares over 2 rho, or differences minus rho / 2."""
    difference = (label.reshape(pred.shape) - pred).abs()
    small = difference.square() / (2 * rho)
    return _weighted(
        torch.where(difference > rho, difference - rho / 2, small), sample_weight, weight
    )


def cross_entropy(
    pred: Tensor,
    label: Tensor,
    sample_weight: Tensor | None = None,
    weight: float | None = None,
    axis: int = -1,
    sparse_label: bool = True,
    from_logits: bool = False,
) -> Tensor:
    """Return the cross-entropy of scores and labels."""
    scores = pred if from_logits else torch.log_softmax(pred, axis)
    if sparse_label:
        places = label.long()
        places = places.unsqueeze(axis) if places.ndim < scores.ndim else places
        loss = -scores.gather(axis, places)
    else:
        loss = -(scores * label.reshape(scores.shape)).sum(axis, keepdim=True)
    return _weighted(loss, sample_weight, weight)


def binary_cross_entropy(
    pred: Tensor,
    label: Tensor,
    sample_weight: Tensor | None = None,
    weight: float | None = None,
    from_sigmoid: bool = False,
) -> Tensor:
    """Return the binary cross-entropy of scores or probabilities."""
    label = label.reshape(pred.shape).to(pred.dtype)
    compute = (
        functional.binary_cross_entropy
        if from_sigmoid
        else functional.binary_cross_entropy_with_logits
    )
    return _weighted(compute(pred, label, reduction="none"), sample_weight, weight)
