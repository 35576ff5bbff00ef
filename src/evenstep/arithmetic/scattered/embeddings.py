"""Gradients of embeddings, and sums of embeddings in bags."""

from __future__ import annotations

import torch

from evenstep.arithmetic.arrays import is_float32
from evenstep.arithmetic.operations import composed, kernel
from evenstep.arithmetic.scattered.indexing import NOWHERE, add_rows

aten = torch.ops.aten

_SUM, _MEAN, _MAX = range(3)


@kernel("embedding_dense_backward")
def embedding_dense_backward(
    grad: torch.Tensor,
    indices: torch.Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> torch.Tensor:
    """Return, for each row of weights, the sum of the gradients of its uses, in their order.

    With scale_grad_by_freq, it is divided by the number of uses.
    """
    if not is_float32(grad):
        return NotImplemented
    return _gradient(
        grad.reshape(-1, grad.shape[-1]),
        indices.reshape(-1),
        num_weights,
        padding_idx,
        scale_grad_by_freq,
    )


def _gradient(
    rows: torch.Tensor, indices: torch.Tensor, num_weights: int, skipped: int, by_count: bool
) -> torch.Tensor:
    result = torch.zeros(num_weights, rows.shape[1], dtype=rows.dtype)
    add_rows(result, indices, rows, skipped=skipped if skipped >= 0 else NOWHERE)
    if by_count:
        counts = torch.bincount(indices, minlength=num_weights).clamp_(min=1)
        result.div_(counts.unsqueeze(1))
    return result


@kernel("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[torch.Tensor, ...]:
    """Return sums or means of the rows of each bag, in order, and what the gradient needs.

    A row is multiplied by its weight first; a sum is divided by the number of rows for a mean. Rows
    of padding_idx are left out. Maxima are not portable yet.
    """
    if mode == _MAX or not is_float32(weight, per_sample_weights):
        return NotImplemented
    indices, offsets = indices.to(torch.int64), offsets.to(torch.int64)
    bags = len(offsets) - include_last_offset
    if bags > 0 and not 0 == int(offsets[0]) <= int(offsets[-1]) <= len(indices):
        raise RuntimeError(
            f"offsets of {len(indices)} indices begin with 0 and end with at most that, but got "
            f"{int(offsets[0])} and {int(offsets[-1])}"
        )
    starts = torch.bincount(offsets[:bags], minlength=len(indices) + 1)
    bag_of = starts.cumsum(0)[: len(indices)] - 1
    used = indices != padding_idx
    rows = weight.index_select(0, indices)
    if per_sample_weights is not None:
        rows = rows.mul_(per_sample_weights.unsqueeze(1))
    if padding_idx >= 0:
        rows, placed = rows[used], bag_of[used]
    else:
        placed = bag_of
    sums = torch.zeros(bags, weight.shape[1], dtype=weight.dtype)
    add_rows(sums, placed, rows)
    sizes = torch.bincount(placed, minlength=bags)
    if mode == _MEAN:
        sums.div_(sizes.clamp(min=1).unsqueeze(1))
    return sums, bag_of, sizes, torch.empty(0, dtype=torch.int64)


@kernel("_embedding_bag_dense_backward")
def embedding_bag_dense_backward(
    grad: torch.Tensor,
    indices: torch.Tensor,
    offset2bag: torch.Tensor,
    bag_size: torch.Tensor,
    maximum_indices: torch.Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: torch.Tensor | None,
    padding_idx: int = -1,
) -> torch.Tensor:
    """Return, for each row of weights, the sum of the gradients of its uses, in their order."""
    if mode == _MAX or not is_float32(grad):
        return NotImplemented
    if mode == _MEAN:
        grad = grad / bag_size.clamp(min=1).unsqueeze(1)
    rows = grad.index_select(0, offset2bag)
    if per_sample_weights is not None:
        rows.mul_(per_sample_weights.unsqueeze(1))
    return _gradient(rows, indices.to(torch.int64), num_weights, padding_idx, scale_grad_by_freq)


@kernel("_embedding_bag_backward")
def embedding_bag_backward(
    grad: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    offset2bag: torch.Tensor,
    bag_size: torch.Tensor,
    maximum_indices: torch.Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: torch.Tensor | None,
    padding_idx: int = -1,
) -> torch.Tensor:
    """Return, for each row of weights, the sum of the gradients of its uses, in their order."""
    if sparse:
        return NotImplemented
    scale, shape = (scale_grad_by_freq, mode), (bag_size, maximum_indices, num_weights)
    return embedding_bag_dense_backward(
        grad, indices, offset2bag, *shape, *scale, per_sample_weights, padding_idx
    )


@composed("_embedding_bag_per_sample_weights_backward")
def per_sample_weights_backward(
    grad: torch.Tensor,
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    offset2bag: torch.Tensor,
    mode: int,
    padding_idx: int = -1,
) -> torch.Tensor:
    """Return the sum of grad · weight over the columns, for each row that was used."""
    products = grad.index_select(0, offset2bag) * weight.index_select(0, indices)
    return products.sum(1).masked_fill(indices == padding_idx, 0.0)
