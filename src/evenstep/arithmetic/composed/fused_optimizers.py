"""Fused optimizers, as the operations that the plain ones consist of.

The formulas are those of `torch.optim.SGD`, `Adam`, `AdamW` and `Adagrad`, without `fused=True`.
A GradScaler's scale is divided out of the gradients, in place, and where it has found an infinite
gradient (`found_inf` is 1), nothing is updated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from evenstep.arithmetic.operations import composed

aten = torch.ops.aten

Tensors = Sequence[torch.Tensor]


@composed("_fused_sgd_", "_fused_sgd_.tensor_lr")
def fused_sgd(
    parameters: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    *,
    weight_decay: float,
    momentum: float,
    lr: float | torch.Tensor,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Update parameters by stochastic gradient descent with momentum."""
    if _is_skipped(found_inf):
        return
    for number, (parameter, given) in enumerate(zip(parameters, grads, strict=True)):
        grad = _gradient(given, parameter, weight_decay, maximize, grad_scale)
        if momentum:
            buffer = momentum_buffers[number]
            if is_first_step:
                buffer.copy_(grad)
            else:
                buffer.mul_(momentum).add_(grad, alpha=1 - dampening)
            grad = grad.add(buffer, alpha=momentum) if nesterov else buffer
        parameter.add_(grad, alpha=-float(lr))


def _adam(
    parameters: Tensors,
    grads: Tensors,
    means: Tensors,
    squares: Tensors,
    largest: Tensors,
    steps: Tensors,
    *,
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: torch.Tensor | None,
    is_decoupled: bool,
) -> None:
    rate = float(lr)
    for number, (parameter, given) in enumerate(zip(parameters, grads, strict=True)):
        decay = 0.0 if is_decoupled else weight_decay
        grad = _gradient(given, parameter, decay, maximize, grad_scale)
        if is_decoupled:
            parameter.mul_(1 - rate * weight_decay)
        means[number].lerp_(grad, 1 - beta1)
        squares[number].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        step = float(steps[number])
        second = squares[number]
        if amsgrad:
            second = largest[number].copy_(torch.maximum(largest[number], second))
        root = (second.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)
        parameter.addcdiv_(means[number], root, value=-rate / (1 - beta1**step))


@composed("_fused_adam_", "_fused_adam_.tensor_lr")
def fused_adam(
    *lists: Tensors,
    found_inf: torch.Tensor | None = None,
    grad_scale: None = None,
    **options: float,
) -> None:
    """Update parameters by Adam (Kingma and Ba, 2015)."""
    if not _is_skipped(found_inf):
        _adam(*lists, grad_scale=grad_scale, is_decoupled=False, **options)  # type: ignore[arg-type]


@composed("_fused_adamw_", "_fused_adamw_.tensor_lr")
def fused_adamw(
    *lists: Tensors,
    found_inf: torch.Tensor | None = None,
    grad_scale: None = None,
    **options: float,
) -> None:
    """Update parameters by AdamW (Loshchilov and Hutter, 2019)."""
    if not _is_skipped(found_inf):
        _adam(*lists, grad_scale=grad_scale, is_decoupled=True, **options)  # type: ignore[arg-type]


@composed("_fused_adagrad_", "_fused_adagrad_.tensor_lr")
def fused_adagrad(
    parameters: Tensors,
    grads: Tensors,
    sums: Tensors,
    steps: Tensors,
    *,
    lr: float | torch.Tensor,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Update parameters by Adagrad (Duchi, Hazan and Singer, 2011)."""
    if _is_skipped(found_inf):
        return
    for parameter, given, total, step in zip(parameters, grads, sums, steps, strict=True):
        grad = _gradient(given, parameter, weight_decay, maximize, grad_scale)
        rate = float(lr) / (1 + (float(step) - 1) * lr_decay)
        total.addcmul_(grad, grad, value=1)
        parameter.addcdiv_(grad, total.sqrt().add_(eps), value=-rate)


def _is_skipped(found_inf: torch.Tensor | None) -> bool:
    return found_inf is not None and float(found_inf) == 1.0


def _gradient(
    grad: torch.Tensor,
    parameter: torch.Tensor,
    weight_decay: float,
    maximize: bool,
    grad_scale: torch.Tensor | None,
) -> torch.Tensor:
    if grad_scale is not None:
        grad.div_(grad_scale)
    if maximize:
        grad = -grad
    return grad.add(parameter, alpha=weight_decay) if weight_decay else grad
