"""Attention in one call has the bits of its operations one by one."""

import math

import pytest
import torch
from torch.nn import functional

import attention_by_steps
import evenstep
from exact_floats import same


@pytest.mark.parametrize("masked", ["no", "causal", "added", "rows that see nothing"])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7, 4), (1, 1, 1, 1, 8), (3, 2, 33, 33, 16)])
def test_it_is_its_operations(variant, masked, shape):
    batch, heads, targets, sources, width = shape
    generator = torch.Generator().manual_seed(0)

    def heads_last(length, width):  # as models have them: (batch, length, heads, width), turned
        found = torch.rand(batch, length, heads, width, generator=generator) * 4 - 2
        return found.transpose(1, 2).requires_grad_()

    query, key = heads_last(targets, width), heads_last(sources, width)
    value, grad = heads_last(sources, width), heads_last(targets, width).detach()
    mask = None
    if masked == "added":
        mask = torch.rand(targets, sources, generator=generator)
    if masked == "rows that see nothing":
        mask = torch.zeros(batch, 1, targets, sources)
        mask[:, :, ::2] = -math.inf
    is_causal = masked == "causal"
    with evenstep.portable():
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal
        )
        found = torch.autograd.grad(out, (query, key, value), grad)
        operands, scale = [one.detach() for one in (query, key, value)], 1 / math.sqrt(width)
        expected, weights = attention_by_steps.attention(*operands, is_causal, mask, scale)
        of = attention_by_steps.gradients(grad, *operands, weights, scale)
    assert same(out.detach(), expected)
    assert all(map(same, found, of))
