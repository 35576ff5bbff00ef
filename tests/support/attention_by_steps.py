"""Attention as its operations one by one, for `evenstep.portable()`."""

import math

import torch

softmax_backward = torch.ops.aten._softmax_backward_data.default


def attention(query, key, value, is_causal, mask, scale):
    """Return the output and the weights."""
    scores = _product(query, key.transpose(2, 3)).mul_(scale)
    if mask is not None:
        scores.add_(mask)
    if is_causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool).tril_()
        scores.masked_fill_(seen.logical_not_(), -math.inf)
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores, -1).masked_fill_(nothing, 0.0)
    return _product(weights, value), weights


def gradients(grad, query, key, value, weights, scale):
    """Return those of query, key and value."""
    of_value = _product(weights.transpose(2, 3), grad)
    of_weights = _product(grad, value.transpose(2, 3))
    of_scores = softmax_backward(of_weights, weights, -1, weights.dtype).mul_(scale)
    return _product(of_scores, key), _product(of_scores.transpose(2, 3), query), of_value


def _product(a, b):
    batch = a.shape[:2]
    product = torch.bmm(a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:]))
    return product.view(*batch, *product.shape[1:])
