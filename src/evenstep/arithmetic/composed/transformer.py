"""torch's fast path for an encoder layer without gradients, as the layer's own operations."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from evenstep.arithmetic.operations import composed

aten = torch.ops.aten

_SOURCE_MASK, _PADDING_MASK = 0, 1  # kinds of masks


@composed("_transformer_encoder_layer_fwd")
def encoder_layer(
    src: torch.Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: torch.Tensor,
    norm_bias_1: torch.Tensor,
    norm_weight_2: torch.Tensor,
    norm_bias_2: torch.Tensor,
    ffn_weight_1: torch.Tensor,
    ffn_bias_1: torch.Tensor,
    ffn_weight_2: torch.Tensor,
    ffn_bias_2: torch.Tensor,
    mask: torch.Tensor | None = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """Return the output of the layer for `src` (batch, length, width), as in `eval()` mode."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return multi_head(x, x, x, embed_dim, num_heads, *weights, mask, False, True, mask_type)[0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden = functional.linear(x, ffn_weight_1, ffn_bias_1)
        hidden = functional.gelu(hidden) if use_gelu else functional.relu(hidden)
        return functional.linear(hidden, ffn_weight_2, ffn_bias_2)

    def first(x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(first(src))
        return x + forward(second(x))
    x = first(src + attend(src))
    return second(x + forward(x))


@composed("_native_multi_head_attention")
def multi_head(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (batch, targets, width), and the weights if they are needed."""
    inputs = (query, key, value)
    parts = zip(inputs, qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    q, k, v = (
        functional.linear(x, weight, bias).unflatten(-1, (num_head, -1)).transpose(1, 2)
        for x, weight, bias in parts
    )
    scores = torch.matmul(q, k.transpose(2, 3)) * (1 / math.sqrt(q.shape[-1]))
    if mask is not None:
        if mask_type == _PADDING_MASK:
            mask = mask[:, None, None, :]
        scores = scores.masked_fill(mask.bool(), -math.inf)
    weights = torch.softmax(scores, -1)
    together = torch.matmul(weights, v).transpose(1, 2).flatten(2)
    output = functional.linear(together, proj_weight, proj_bias)
    if not need_weights:
        return output, output.new_empty(0)
    return output, weights.mean(1) if average_attn_weights else weights
