"""Metrics as totals and counts, so that they add up exactly over shards and batches.

A metric is a function `metric(output, *targets) -> (total, count)`; its value over a data set is
the sum of the totals over the sum of the counts.
"""

from __future__ import annotations

import torch


def accuracy(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Count the examples whose largest score is at the target class.

    Args:
        output: scores, float, shape (n, classes).
        target: class numbers, integer, shape (n,).

    Returns:
        (number of right answers, integer scalar tensor; n).
    """
    return (output.argmax(dim=1) == target).sum(), target.shape[0]
