"""Softmax and the losses made of it. Sums are in the order of `c/sums.h`."""

from __future__ import annotations

import ctypes
import functools

import torch

from evenstep.arithmetic.arrays import is_float32
from evenstep.arithmetic.native import Function
from evenstep.arithmetic.operations import kernel
from evenstep.arithmetic.sums.arranged import sizes_around

_softmax = Function("softmax", "llllpp")
_softmax_gradient = Function("softmax_gradient", "llllppp")
_likelihood = Function("likelihood", "lllpppllppp")
_likelihood_gradient = Function("likelihood_gradient", "lllpppllppp")


def _softmaxed(log: bool, x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    """Return exp(x − m) / s or (x − m) − log(s): m is the largest x, s the sum of exp(x − m)."""
    if half_to_float or not is_float32(x):
        return NotImplemented
    outer, n, inner = sizes_around(x, dim)
    x = x.contiguous()
    out = torch.empty_like(x)
    _softmax(log, outer, n, inner, x.data_ptr(), out.data_ptr())
    return out


def _softmax_backward(
    log: bool, grad: torch.Tensor, output: torch.Tensor, dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return (g − sum of g · y) · y, or for logarithms g − exp(y) · (sum of g)."""
    if dtype is not torch.float32 or not is_float32(grad, output):
        return NotImplemented
    if grad.shape != output.shape:
        raise RuntimeError(f"outputs {tuple(output.shape)}, but gradients {tuple(grad.shape)}")
    outer, n, inner = sizes_around(output, dim)
    grad, output = grad.contiguous(), output.contiguous()
    out = torch.empty_like(output)
    _softmax_gradient(log, outer, n, inner, grad.data_ptr(), output.data_ptr(), out.data_ptr())
    return out


for _log, _name in ((False, "_softmax"), (True, "_log_softmax")):  # sums are rounded once
    kernel(_name)(functools.partial(_softmaxed, _log))
    kernel(f"{_name}_backward_data")(functools.partial(_softmax_backward, _log))


def _examples(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None
) -> tuple[int, int, int]:
    """Return the batch size, the number of classes, and the examples of each row of the batch.

    Raises:
        RuntimeError: there isn't a weight for each class.
        ValueError: the targets don't have the shape of the scores without their classes.
    """
    at = 1 if x.ndim > 1 else 0
    expected = x.shape[:at] + x.shape[at + 1 :]
    if target.shape != expected and (at or target.numel() != 1):
        raise ValueError(
            f"scores of shape {tuple(x.shape)} need targets of shape {tuple(expected)}, but got "
            f"{tuple(target.shape)}"
        )
    batch, classes, inner = sizes_around(x, at)
    if weight is not None and weight.shape != (classes,):
        raise RuntimeError(f"{classes} classes, but weights of shape {tuple(weight.shape)}")
    return batch, classes, inner


def _is_taken(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None) -> bool:
    return is_float32(x, weight) and target.dtype is torch.int64


@kernel("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the negative log-likelihood, and the total weight.

    An example's is −weight[t] · x[t]; their sum, and for the mean the sum of weights, which divides
    it in double, go over all examples in row-major order. Ignored ones add nothing.

    Raises:
        IndexError: a target is neither a class nor ignored.
    """
    if not _is_taken(x, target, weight):
        return NotImplemented
    out = x.new_empty(target.shape if reduction == 0 else ())
    total = x.new_empty(())
    nll_losses(x[None], target[None], weight, reduction, ignore_index, out[None], total[None])
    return out, total


def nll_losses(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    out: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """Write the negative log-likelihoods of several batches, along the first dimension.

    Raises:
        IndexError: a target is neither a class nor ignored.
    """
    batch, classes, inner = _examples(x[0], target[0], weight)
    x, target = x.contiguous(), target.contiguous()
    weight = weight if weight is None else weight.contiguous()
    wrong = ctypes.c_long(ignore_index)
    for number in range(len(x)):
        _likelihood(
            *(batch, classes, inner, _address(x, number), _address(target, number)),
            *(0 if weight is None else weight.data_ptr(), ignore_index, reduction),
            *(_address(out, number), _address(total, number), ctypes.addressof(wrong)),
        )
        _check_targets(wrong, ignore_index, classes)


def _address(tensor: torch.Tensor, number: int) -> int:
    """Return the address of a part of a tensor, along its first dimension."""
    return tensor.data_ptr() + number * tensor.stride(0) * tensor.itemsize


@kernel("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    """Return −weight[t] · g at each target t, 0 elsewhere; for the mean, g is g / total weight."""
    if not (_is_taken(x, target, weight) and is_float32(grad_output, total_weight)):
        return NotImplemented
    given = (grad_output.contiguous()[None], x[None], target.contiguous()[None])
    return nll_gradients(*given, weight, reduction, ignore_index, total_weight[None])[0]


def nll_gradients(
    grad_output: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total: torch.Tensor,
) -> torch.Tensor:
    """Return the gradients of several batches, along the first dimension."""
    batch, classes, inner = _examples(x[0], target[0], weight)
    weight = weight if weight is None else weight.contiguous()
    if grad_output[0].numel() != (target[0].numel() if reduction == 0 else 1):
        raise RuntimeError(f"got a gradient of shape {tuple(grad_output[0].shape)}")
    out = x.new_empty(x.shape)
    wrong = ctypes.c_long(ignore_index)
    for number in range(len(x)):
        _likelihood_gradient(
            *(batch, classes, inner, _address(grad_output, number), _address(target, number)),
            *(0 if weight is None else weight.data_ptr(), ignore_index, reduction),
            *(_address(total, number), _address(out, number), ctypes.addressof(wrong)),
        )
        _check_targets(wrong, ignore_index, classes)
    return out


def _check_targets(wrong: ctypes.c_long, ignored: int, classes: int) -> None:
    if wrong.value != ignored:
        raise IndexError(f"Target {wrong.value} is out of bounds: there are {classes} classes.")
