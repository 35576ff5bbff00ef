"""Metrics that return a total and a count, so that they add up exactly over shards and batches.

A metric is a function `metric(output, *targets) -> (total, count)`. Its value for a data set is the
sum of the totals divided by the sum of the counts.
"""

from __future__ import annotations

import torch


def accuracy(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Count the examples whose largest score is that of the target class.

    Args:
        output: scores, float, shape (n, classes).
        target: class numbers, integer, shape (n,).

    Returns:
        The number of correct predictions, an integer scalar tensor, and n.
    """
    return (output.argmax(dim=1) == target).sum(), target.shape[0]
