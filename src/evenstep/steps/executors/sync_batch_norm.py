"""Batch normalisation over the whole batch, for shards that are computed separately.

Ioffe and Szegedy, "Batch Normalization" (2015); Dive into Deep Learning, section "Batch
Normalization". Each shard brings its count, mean and sum of squared deviations, and the canonical
tree merges them by the formula of Chan, Golub and LeVeque, "Algorithms for computing the sample
variance" (1983), which loses no digits where the mean is large. The backward pass adds up the two
sums over the whole batch that the gradient needs in the same tree.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from evenstep.shard.lockstep import ShardInStep


class Moments(NamedTuple):
    """The count, mean and variance of a part of a batch, for each of C channels.

    Attributes:
        size: the number of values in each channel.
        mean: the means, of shape (C,).
        squares: the sums of the squared deviations from the mean, of shape (C,).
    """

    size: int
    mean: torch.Tensor
    squares: torch.Tensor


class SyncedBatchNorm(TorchFunctionMode):
    """While active in a thread, normalises there with the statistics of all shards of the step.

    It replaces `torch.nn.functional.batch_norm` in training, which torch's BatchNorm layers call.
    Running statistics are updated with the whole batch's mean and unbiased variance.
    """

    def __init__(self, shard: ShardInStep) -> None:
        super().__init__()
        self._shard = shard
        self._calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, unless it is a batch normalisation in training."""
        call = self._normalise if func is F.batch_norm else func
        return call(*args, **(kwargs or {}))

    def _normalise(
        self,
        input: torch.Tensor,  # noqa: A002 - as torch names it
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if not training:
            return F.batch_norm(
                input, running_mean, running_var, weight, bias, training, momentum, eps
            )
        self._calls += 1
        place = f"BatchNorm call {self._calls}"
        moments = self._shard.sum_over_shards(place, moments_of(input.detach()), merge)
        with torch.no_grad():
            _update_running(running_mean, moments.mean, momentum)
            _update_running(running_var, moments.squares / (moments.size - 1), momentum)
        normalised: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, weight, bias, moments, eps, self._shard, f"the backward pass of {place}"
        )
        return normalised


def moments_of(values: torch.Tensor) -> Moments:
    """Return the moments of a shard's values of shape (N, C, ...), in at least single precision."""
    values = values.to(_wide(values))
    mean, variance = torch.batch_norm_update_stats(values, None, None, 0.0)
    count = values.numel() // values.shape[1]
    return Moments(count, mean, variance * count)


def merge(left: Moments, right: Moments) -> Moments:
    """Return the moments of both parts together (Chan, Golub and LeVeque, formula 2.1)."""
    count = left.size + right.size
    delta = right.mean - left.mean
    mean = left.mean + delta * (right.size / count)
    between = delta * delta * (left.size * right.size / count)
    return Moments(count, mean, left.squares + right.squares + between)


class _Normalise(torch.autograd.Function):
    """(x − mean) / √(variance + eps) · weight + bias; mean and variance depend on the whole batch.

    With x̂ the normalised values, N their count and Σ over the whole batch, the gradient is
    weight / √(variance + eps) · (dy − Σdy / N − x̂ · Σ(dy · x̂) / N).
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        moments: Moments,
        eps: float,
        shard: ShardInStep,
        place: Hashable,
    ) -> torch.Tensor:
        wide = _wide(values)
        variance = moments.squares / moments.size
        scale = None if weight is None else weight.to(wide)
        shift = None if bias is None else bias.to(wide)
        ctx.save_for_backward(values, scale, moments.mean, torch.rsqrt(variance + eps))
        ctx.given = (moments.size, shard, place, weight, bias)
        y = F.batch_norm(values.to(wide), moments.mean, variance, scale, shift, False, 0.0, eps)
        return y.to(values.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        values, scale, mean, inverse = ctx.saved_tensors
        count, shard, place, weight, bias = ctx.given
        x, dy = values.to(mean.dtype), gradients[0].to(mean.dtype)
        own = _sums(dy, x, mean, inverse)
        total, total_scaled = shard.sum_over_shards(place, own, _add_pairs)
        dx = None
        if ctx.needs_input_grad[0]:
            factor = inverse if scale is None else inverse * scale
            slope = -factor * inverse * total_scaled / count
            offset = -factor * total / count - slope * mean
            shape = [1, -1] + [1] * (x.ndim - 2)
            dx = torch.addcmul(offset.view(shape), x, slope.view(shape))
            dx = dx.addcmul_(dy, factor.view(shape)).to(values.dtype)
        d_weight = own[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        d_bias = own[0].to(bias.dtype) if ctx.needs_input_grad[2] else None
        return dx, d_weight, d_bias, None, None, None, None


def _sums(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, inverse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return Σdy and Σ(dy · x̂) of one shard, each of shape (C,)."""
    _, scaled, plain = torch.ops.aten.native_batch_norm_backward(
        dy, x, torch.ones_like(mean), None, None, mean, inverse, True, 0.0, [False, True, True]
    )
    return plain, scaled


def _add_pairs(
    left: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    return left[0] + right[0], left[1] + right[1]


def _update_running(running: torch.Tensor | None, value: torch.Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(value, alpha=momentum)


def _wide(values: torch.Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)
