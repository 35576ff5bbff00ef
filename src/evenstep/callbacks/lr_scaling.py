"""Scales the learning rate to a different batch size."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias, get_args

import torch
from torch.optim.lr_scheduler import LambdaLR

from evenstep.errors import InputError, hides_own_frames
from evenstep.options.checks import check_choice

Rule: TypeAlias = Literal["linear", "sqrt"]


@hides_own_frames
def scale_lr(
    optimizer: torch.optim.Optimizer,
    *,
    base_batch_size: int,
    batch_size: int,
    rule: Rule = "linear",
    warmup_steps: int = 0,
    total_steps: int | None = None,
) -> LambdaLR:
    """Return a scheduler that scales an optimizer's learning rates to a different batch size.

    With k = batch_size / base_batch_size, the rate becomes k times the optimizer's own ("linear":
    Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", 2017) or √k times
    ("sqrt": Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014,
    which keeps the variance of the updates). During `warmup_steps` it grows linearly from the
    optimizer's own rate, because new weights may not tolerate a large one (Goyal et al., section
    2.2). Then it stays constant or, with `total_steps`, falls along half a cosine to 0 (Loshchilov
    and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017).

    Call its `step` after each training step. Pass it as `Trainer(scheduler=...)` to save it in
    checkpoints.

    Args:
        optimizer: an optimizer whose learning rates suit `base_batch_size`.
        base_batch_size: the batch size for which these rates were chosen.
        batch_size: the batch size to scale to.
        rule: "linear" or "sqrt".
        warmup_steps: length of the warm-up in steps; 0: no warm-up.
        total_steps: length of the training in steps, including the warm-up; None: the rate stays
            constant after the warm-up.

    Raises:
        InputError: an unknown rule, a number below 1 (`warmup_steps`: below 0), or a warm-up as
            long as the training.
    """
    check_choice("rule", rule, get_args(Rule))
    if base_batch_size < 1 or batch_size < 1 or warmup_steps < 0:
        raise InputError(
            f"got base_batch_size={base_batch_size}, batch_size={batch_size} and "
            f"warmup_steps={warmup_steps}: give at least 1, 1 and 0"
        )
    if total_steps is not None and total_steps <= warmup_steps:
        raise InputError(
            f"got warmup_steps={warmup_steps} and total_steps={total_steps}: the warm-up must be "
            f"shorter than the training"
        )
    k = batch_size / base_batch_size
    factor = k if rule == "linear" else math.sqrt(k)

    def factor_at(step: int) -> float:
        if step < warmup_steps:
            return 1 + (factor - 1) * step / warmup_steps
        if total_steps is None:
            return factor
        done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
        return factor * (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, factor_at)
