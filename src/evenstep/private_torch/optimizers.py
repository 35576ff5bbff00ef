"""Optimizers: the hooks on their step, who wraps it, and how torch sorts parameters into groups."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from evenstep.private_torch.names import attribute, private

_HOOKS = "refuse a step in the middle of another one"
_SGD = torch.optim.SGD([torch.zeros(1, device="cpu")], lr=0.1)
_SCHEDULED = torch.optim.lr_scheduler.ConstantLR(_SGD).optimizer.step

pre_hooks: Callable[[torch.optim.Optimizer], OrderedDict[int, Callable[..., Any]]] = attribute(
    _SGD, "_optimizer_step_pre_hooks", _HOOKS
)
post_hooks: Callable[[torch.optim.Optimizer], OrderedDict[int, Callable[..., Any]]] = attribute(
    _SGD, "_optimizer_step_post_hooks", _HOOKS
)

_is_schedulers = attribute(
    _SCHEDULED, "_wrapped_by_lr_sched", "tell a scheduler's step from one that the user replaced"
)

by_device_and_dtype: Callable[..., dict[Any, Any]] = private(
    "torch.utils._foreach_utils",
    "_group_tensors_by_device_and_dtype",
    "add up norms in the order of torch.nn.utils.clip_grad_norm_",
    needed=False,
)


def has_replaced_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a `step` was set on an optimizer itself, by others than a scheduler."""
    step = optimizer.__dict__.get("step")
    while hasattr(step, "_wrapped_by_lr_sched") and _is_schedulers(step):
        step = step.__wrapped__  # type: ignore[union-attr]
    return step is not None and getattr(step, "__func__", step) is not type(optimizer).step


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a learning-rate scheduler was made for an optimizer.

    ReduceLROnPlateau leaves no trace on it.
    """
    step = optimizer.__dict__.get("step")
    return hasattr(step, "_wrapped_by_lr_sched") or any(
        "initial_lr" in group for group in optimizer.param_groups
    )
