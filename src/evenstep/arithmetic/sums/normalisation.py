"""Batch, layer and group normalisation. Sums are in the order of `c/sums.h`.

A variance is the mean of squared deviations from the mean, in double; invstd is 1 / √(variance +
eps), in double, rounded once. Contiguous and channels-last inputs have the same bits, and results
have the layout of the input, as torch's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from evenstep.arithmetic.arrays import is_float32, layout_of
from evenstep.arithmetic.native import Function, scratch
from evenstep.arithmetic.operations import composed, kernel

_batch_norm = Function("batch_norm", "lllpppppddppp")
_batch_norm_fixed = Function("batch_norm_fixed", "lllpppppdpp")
_batch_norm_gradient = Function("batch_norm_gradient", "llllpppppppp")
_layer_norm = Function("layer_norm", "llpppdppp")
_layer_norm_gradient = Function("layer_norm_gradient", "llpppppppp")
_group_norm = Function("group_norm", "llllpppdppp")
_group_norm_gradient = Function("group_norm_gradient", "llllppppppppp")

Maybe: TypeAlias = "torch.Tensor | None"
Three: TypeAlias = "tuple[torch.Tensor, torch.Tensor, torch.Tensor]"
Gradients: TypeAlias = "tuple[Maybe, Maybe, Maybe]"


def _pointer(tensor: Maybe) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _dense(count: int, *tensors: Maybe) -> list[Maybe]:
    """Return tensors of `count` numbers each, contiguous.

    Raises:
        RuntimeError: one has more or fewer numbers.
    """
    for one in tensors:
        if one is not None and one.numel() != count:
            raise RuntimeError(f"expected {count} numbers, but got shape {tuple(one.shape)}")
    return [one if one is None else one.contiguous() for one in tensors]


def _check_shape(tensor: torch.Tensor, expected: Sequence[int]) -> None:
    if list(tensor.shape) != list(expected):
        raise RuntimeError(f"expected shape {tuple(expected)}, but got {tuple(tensor.shape)}")


def _channels(x: torch.Tensor) -> tuple[torch.memory_format, tuple[int, int, int]]:
    """Return the memory format to bring an input to, and its sizes there.

    The sizes are the batch, its channels, and the elements of each; with channels last, the batch
    is that of all places, and each channel has one element.
    """
    batch, channels = x.shape[:2]
    length = math.prod(x.shape[2:])
    layout = layout_of(x)
    if layout is torch.contiguous_format:
        return layout, (batch, channels, length)
    return layout, (batch * length, channels, 1)


@kernel("native_batch_norm", "_native_batch_norm_legit")
def batch_norm(
    x: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    running_mean: Maybe,
    running_var: Maybe,
    training: bool,
    momentum: float,
    eps: float,
) -> Three:
    """Return (x − mean) · (invstd · weight) + bias, the mean and invstd: empty in evaluation.

    Each step is rounded. In training, the mean and the variance are those of the batch; the running
    ones get momentum · own + (1 − momentum) · running, in double, rounded once, where the own
    variance is divided by the count − 1.
    """
    if not is_float32(x, weight, bias, running_mean, running_var):
        return NotImplemented
    if training and not x.numel():
        raise ValueError(f"batch normalisation needs an example, but got shape {tuple(x.shape)}")
    layout, sizes = _channels(x)
    x = x.contiguous(memory_format=layout)
    out = torch.empty_like(x)
    channels = sizes[1]
    weight, bias, *running = _dense(channels, weight, bias, running_mean, running_var)
    before = *sizes, x.data_ptr(), _pointer(weight), _pointer(bias)
    if not training:
        assert None not in running
        _batch_norm_fixed(
            *(*before, *map(_pointer, running), eps, scratch(channels), out.data_ptr())
        )
        return out, x.new_empty(0), x.new_empty(0)
    mean, invstd = x.new_empty(channels), x.new_empty(channels)
    _batch_norm(
        *(*before, *map(_pointer, running), momentum, eps),
        *(mean.data_ptr(), invstd.data_ptr(), out.data_ptr()),
    )
    for given, used in zip((running_mean, running_var), running, strict=True):
        if given is not used and given is not None and used is not None:
            given.copy_(used)
    return out, mean, invstd


@kernel("_native_batch_norm_legit.no_stats")
def batch_norm_without_statistics(
    x: torch.Tensor, weight: Maybe, bias: Maybe, training: bool, momentum: float, eps: float
) -> Three:
    """Return what `batch_norm` returns, by the batch's moments."""
    return batch_norm(x, weight, bias, None, None, True, momentum, eps)


@kernel("_native_batch_norm_legit_functional")
def batch_norm_functional(
    x: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Return what `batch_norm` returns, and the new running moments."""
    moments = running_mean.clone(), running_var.clone()
    result = batch_norm(x, weight, bias, *moments, training, momentum, eps)
    return result if result is NotImplemented else (*result, *moments)


@kernel("_native_batch_norm_legit_no_training")
def batch_norm_in_evaluation(*args: Any) -> Three:
    """Return what `batch_norm` returns in evaluation."""
    return batch_norm(*(*args[:5], False, *args[5:]))


def _with_reserve(training: bool, *args: Any) -> tuple[torch.Tensor, ...]:
    """Return what `batch_norm` returns, and an empty reserve."""
    result = batch_norm(*(*args[:5], training, *args[5:]))
    return result if result is NotImplemented else (*result, torch.empty(0, dtype=torch.uint8))


kernel("_batch_norm_with_update")(functools.partial(_with_reserve, True))
kernel("_batch_norm_no_update")(functools.partial(_with_reserve, False))


@kernel("native_batch_norm_backward")
def batch_norm_backward(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    weight: Maybe,
    running_mean: Maybe,
    running_var: Maybe,
    save_mean: Maybe,
    save_invstd: Maybe,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Gradients:
    """Return the gradients of the input, the weight and the bias.

    With S1 the sum of g and S2 that of g · (x − mean), in double: of the bias S1, of the weight
    S2 · invstd, of the input ((g − S1 / count) − (x − mean) · (S2 / count · invstd²)) · scale,
    scale = invstd · weight; in evaluation, g · scale.
    """
    given = (save_mean, save_invstd) if train else (running_mean, running_var)
    if not is_float32(grad_out, x, weight, *given):
        return NotImplemented
    layout, sizes = _channels(x)
    _check_shape(grad_out, x.shape)
    x, grad_out = (one.contiguous(memory_format=layout) for one in (x, grad_out))
    channels = sizes[1]
    weight, mean, invstd = _dense(channels, weight, *given)
    if not train:
        variance, invstd = invstd, x.new_empty(channels)
        before = *sizes, 0, 0, 0, _pointer(mean), _pointer(variance)
        _batch_norm_fixed(*before, eps, invstd.data_ptr(), 0)
    outputs = [torch.empty_like(x) if output_mask[0] else None]
    outputs += [x.new_empty(channels) if is_wanted else None for is_wanted in output_mask[1:]]
    _batch_norm_gradient(
        *(not train, *sizes, grad_out.data_ptr(), x.data_ptr()),
        *map(_pointer, (weight, mean, invstd, *outputs)),
    )
    return outputs[0], outputs[1], outputs[2]


@kernel("batch_norm_backward")
def batch_norm_backward_with_reserve(*args: Any) -> Gradients:
    """Return what `batch_norm_backward` returns: the last argument is the reserve."""
    return batch_norm_backward(*args[:-1])


def _rows(
    x: torch.Tensor, normalized_shape: Sequence[int], *affine: Maybe
) -> tuple[list[int], int, int]:
    """Return the shape of the moments, the number of rows, and their length.

    Raises:
        RuntimeError: the input, the weight or the bias doesn't have the normalised shape.
    """
    kept = max(x.ndim - len(normalized_shape), 0)
    outer = list(x.shape[:kept])
    _check_shape(x, [*outer, *normalized_shape])
    for one in affine:
        if one is not None:
            _check_shape(one, normalized_shape)
    return outer + [1] * len(normalized_shape), math.prod(outer), math.prod(normalized_shape)


@kernel("native_layer_norm")
def layer_norm(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: Maybe, bias: Maybe, eps: float
) -> Three:
    """Return ((x − mean) · invstd) · weight + bias, the mean and invstd, by those of each row.

    Each step is rounded. An absent weight is 1, an absent bias 0.
    """
    if not is_float32(x, weight, bias):
        return NotImplemented
    moments, rows, n = _rows(x, normalized_shape, weight, bias)
    x = x.contiguous()
    out, mean, invstd = torch.empty_like(x), x.new_empty(moments), x.new_empty(moments)
    weight = x.new_ones(n) if weight is None else weight.contiguous()
    bias = x.new_zeros(n) if bias is None else bias.contiguous()
    _layer_norm(
        *(rows, n, x.data_ptr(), weight.data_ptr(), bias.data_ptr(), eps),
        *(mean.data_ptr(), invstd.data_ptr(), out.data_ptr()),
    )
    return out, mean, invstd


@kernel("native_layer_norm_backward")
def layer_norm_backward(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    output_mask: Sequence[bool],
) -> Gradients:
    """Return the gradients of the input, the weight and the bias.

    With h = g · weight, and of each row S1 the sum of h and S2 that of h · (x − mean), in double,
    that of the input is ((h − S1 / n) − (x − mean) · (S2 / n · invstd²)) · invstd. Those of the
    weight and the bias are the sums over rows of g · (x − mean) · invstd, in double, and of g.
    """
    if not is_float32(grad_out, x, mean, rstd, weight):
        return NotImplemented
    _, rows, n = _rows(x, normalized_shape, weight, bias)
    _check_shape(grad_out, x.shape)
    moments = _dense(rows, mean, rstd)
    x, grad_out = x.contiguous(), grad_out.contiguous()
    own = x.new_ones(n) if weight is None else weight.contiguous()
    likes = x, weight, bias
    wanted = [m and like is not None for m, like in zip(output_mask, likes, strict=True)]
    shapes = x.shape, normalized_shape, normalized_shape
    outputs = [x.new_empty(shape) if m else None for m, shape in zip(wanted, shapes, strict=True)]
    _layer_norm_gradient(
        *(rows, n, grad_out.data_ptr(), x.data_ptr(), own.data_ptr()),
        *map(_pointer, (*moments, *outputs)),
    )
    return outputs[0], outputs[1], outputs[2]


@kernel("native_group_norm")
def group_norm(
    x: torch.Tensor,
    weight: Maybe,
    bias: Maybe,
    N: int,  # noqa: N803 - torch's names
    C: int,  # noqa: N803
    HxW: int,  # noqa: N803
    group: int,
    eps: float,
) -> Three:
    """Return (x − mean) · (invstd · weight) + bias, the mean and invstd, by those of each group."""
    if not is_float32(x, weight, bias):
        return NotImplemented
    _check_groups(x, N, C, HxW, group)
    layout, x = layout_of(x), x.contiguous()
    weight, bias = _dense(C, weight, bias)
    out, mean, invstd = torch.empty_like(x), x.new_empty(N, group), x.new_empty(N, group)
    _group_norm(
        *(N, group, C // group, HxW, x.data_ptr(), _pointer(weight), _pointer(bias), eps),
        *(mean.data_ptr(), invstd.data_ptr(), out.data_ptr()),
    )
    return out.contiguous(memory_format=layout), mean, invstd


@kernel("native_group_norm_backward")
def group_norm_backward(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: Maybe,
    N: int,  # noqa: N803 - torch's names
    C: int,  # noqa: N803
    HxW: int,  # noqa: N803
    group: int,
    output_mask: Sequence[bool],
) -> Gradients:
    """Return the gradients of the input, the weight and the bias.

    With S1 and S2 the sums of g and of g · (x − mean) over each channel of an example, and T1 and
    T2 those of weight · S1 and weight · S2 over a group's channels, one after the other in double,
    that of the input is ((g · weight − T1 / n) − (x − mean) · (T2 / n · invstd²)) · invstd. Those
    of the bias and the weight are the sums over the examples, one after the other in double, of S1
    and of S2 · invstd.
    """
    if not is_float32(grad_out, x, mean, rstd, weight):
        return NotImplemented
    _check_groups(x, N, C, HxW, group)
    _check_shape(grad_out, x.shape)
    layout, x, grad_out = layout_of(x), x.contiguous(), grad_out.contiguous()
    (weight,), moments = _dense(C, weight), _dense(N * group, mean, rstd)
    shapes = zip(output_mask, (x.shape, (C,), (C,)), strict=True)
    outputs = [x.new_empty(shape) if is_wanted else None for is_wanted, shape in shapes]
    _group_norm_gradient(
        *(N, group, C // group, HxW, grad_out.data_ptr(), x.data_ptr(), _pointer(weight)),
        *(*map(_pointer, (*moments, *outputs)), scratch(4 * C)),
    )
    grad_x = outputs[0]
    grad_x = grad_x if grad_x is None else grad_x.contiguous(memory_format=layout)
    return grad_x, outputs[1], outputs[2]


def _check_groups(x: torch.Tensor, batch: int, channels: int, space: int, groups: int) -> None:
    if groups < 1 or channels % groups or x.numel() != batch * channels * space:
        raise RuntimeError(
            f"{batch} examples with {channels} channels of {space} elements in {groups} groups, "
            f"but got shape {tuple(x.shape)}"
        )


def _other_dims(x: torch.Tensor, dim: int) -> list[int]:
    return [one for one in range(x.ndim) if one != dim % x.ndim]


@composed("_weight_norm_interface")
def weight_norm(
    v: torch.Tensor, g: torch.Tensor, dim: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return v · (g / norm of v), and the norms."""
    norms = torch.linalg.vector_norm(v, 2, _other_dims(v, dim), keepdim=True)
    return v * (g / norms), norms


@composed("_weight_norm_interface_backward")
def weight_norm_backward(
    grad_w: torch.Tensor,
    saved_v: torch.Tensor,
    saved_g: torch.Tensor,
    saved_norms: torch.Tensor,
    dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (grad − v · (s / norm²)) · (g / norm) and s / norm, s the sum of grad · v."""
    sums = (grad_w * saved_v).sum(_other_dims(saved_v, dim), keepdim=True)
    grad_v = (grad_w - saved_v * (sums / (saved_norms * saved_norms))) * (saved_g / saved_norms)
    return grad_v, sums / saved_norms
