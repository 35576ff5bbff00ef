"""Fused optimizers, computed by torch's own plain ones, operation by operation.

A GradScaler's scale is divided out of the gradients, in place, and where it has found an infinite
gradient (`found_inf` is 1), nothing is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from evenstep.arithmetic.operations import composed

Tensors = Sequence[torch.Tensor]
Maybe = torch.Tensor | None

_PLAIN: dict[str, Any] = {"foreach": False, "fused": False}


@composed("_fused_sgd_", "_fused_sgd_.tensor_lr")
def fused_sgd(
    parameters: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    *,
    lr: float | torch.Tensor,
    is_first_step: bool,
    grad_scale: Maybe = None,
    found_inf: Maybe = None,
    **options: Any,
) -> None:
    """Update parameters by stochastic gradient descent with momentum."""
    if not _are_finite(grads, grad_scale, found_inf):
        return
    buffers: list[Maybe] = [None] * len(momentum_buffers) if is_first_step else [*momentum_buffers]
    sgd([*parameters], [*grads], buffers, lr=float(lr), **_PLAIN, **options)
    for given, used in zip(momentum_buffers, buffers, strict=True):
        if used is not None and used is not given:
            given.copy_(used)


def _by_steps(update: Callable[..., None], *names: str) -> None:
    """Let one of torch's functions run in place of fused optimizers that count their steps."""

    @composed(*names)
    def fused(
        parameters: Tensors,
        grads: Tensors,
        *state: Tensors,
        lr: float | torch.Tensor,
        grad_scale: Maybe = None,
        found_inf: Maybe = None,
        **options: Any,
    ) -> None:
        if _are_finite(grads, grad_scale, found_inf):
            *moments, steps = state
            before = [step - 1 for step in steps]  # the function counts this step itself
            lists = map(list, (parameters, grads, *moments, before))
            update(*lists, lr=float(lr), **_PLAIN, **options)


def _are_finite(grads: Tensors, grad_scale: Maybe, found_inf: Maybe) -> bool:
    if found_inf is not None and float(found_inf) == 1.0:
        return False
    if grad_scale is not None:
        for grad in grads:
            grad.div_(grad_scale)
    return True


_by_steps(adam, "_fused_adam_", "_fused_adam_.tensor_lr")
_by_steps(adamw, "_fused_adamw_", "_fused_adamw_.tensor_lr")
_by_steps(adagrad, "_fused_adagrad_", "_fused_adagrad_.tensor_lr")
