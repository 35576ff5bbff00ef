"""The softmax of attention, for targets that may see nothing."""

from __future__ import annotations

import math

import torch

from evenstep.arithmetic.operations import composed


@composed("_safe_softmax")
def safe_softmax(scores: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the softmax, with 0 where all scores of a row are −inf."""
    if dtype is not None:
        scores = scores.to(dtype)
    weights = torch.softmax(scores, dim)
    nothing = (scores == -math.inf).all(dim, keepdim=True)
    return weights.masked_fill_(nothing, 0.0)
