"""Scaled dot-product attention: softmax(query · keyᵀ · scale + mask) · value.

Vaswani et al., "Attention is all you need", 2017, section 3.2.1, with the whole matrix of weights
in memory. The bits are those of its operations one by one: products, softmax, sums.
"""

from __future__ import annotations

import array
import functools
import math

import torch

from evenstep.arithmetic.arrays import is_float32
from evenstep.arithmetic.native import Function, scratch
from evenstep.arithmetic.operations import kernel
from evenstep.arithmetic.sums.products import SCRATCH, Shape

_attend = Function("attend", "pppppppfp")
_attend_backward = Function("attend_backward", "pppppppppfp")

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Sizes:
    """What C needs to know about attention: `struct attention` of `c/attention.c`."""

    def __init__(self, values: list[int], floats: int, more_floats: int) -> None:
        self._values = array.array("l", values)
        self.address = self._values.buffer_info()[0]
        self.floats = floats
        self.backward_floats = floats + more_floats


@functools.lru_cache(maxsize=1024)
def _sizes(
    query: Shape, key: Shape, value: Shape, is_causal: bool, has_mask: bool, *strides: Shape
) -> _Sizes:
    batch, heads, targets, width = query
    sources, values = key[2], value[3]
    floats = SCRATCH + 4 * (targets + sources + width + values) + 16
    numbers = [batch, heads, targets, sources, width, values, is_causal, has_mask]
    for one in strides:
        numbers += one or (0, 0, 0, 0)
    return _Sizes(numbers, floats, 2 * targets * sources + 16)


@kernel("_scaled_dot_product_flash_attention_for_cpu")
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and, for the backward pass, the weights of attention.

    Args:
        query: (batch, heads, targets, width).
        key: (batch, heads, sources, width).
        value: (batch, heads, sources, width of values).
        dropout_p: 0; torch composes attention with dropout of other operations.
        is_causal: whether a target sees no later source.
        attn_mask: added to the scores; broadcast to (batch, heads, targets, sources).
        scale: of the scores; None for 1 / √width.
    """
    if dropout_p or not is_float32(query, key, value, attn_mask):
        return NotImplemented
    batch, heads, targets, _ = query.shape
    sources = key.shape[2]
    if value.shape[2] != sources or key.shape[3] != query.shape[3]:
        raise RuntimeError(
            f"attention of queries {tuple(query.shape)} and keys {tuple(key.shape)} to values "
            f"{tuple(value.shape)}"
        )
    key, value = (one.expand(batch, heads, *one.shape[2:]) for one in (key, value))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(batch, heads, targets, sources)
    out = query.new_empty(batch, targets, heads, value.shape[3])
    weights = query.new_empty(batch, heads, targets, sources)
    sizes = _sizes(
        *(query.shape, key.shape, value.shape, is_causal, attn_mask is not None),
        *(query.stride(), key.stride(), value.stride()),
        *(() if attn_mask is None else attn_mask.stride(), ()),
    )
    addresses = [0 if one is None else one.data_ptr() for one in (query, key, value, attn_mask)]
    addresses += [out.data_ptr(), weights.data_ptr()]
    _attend(sizes.address, *addresses, _scale(query, scale), scratch(sizes.floats))
    return out.transpose(1, 2), weights


@kernel("_scaled_dot_product_flash_attention_for_cpu_backward")
def attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    weights: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Gradients:
    """Return the gradients of query, key and value; `weights` are those that `attention` gave."""
    batch, heads = query.shape[:2]
    key, value = (one.expand(batch, heads, *one.shape[2:]) for one in (key, value))
    sizes = _sizes(
        *(query.shape, key.shape, value.shape, is_causal, False),
        *(query.stride(), key.stride(), value.stride(), (), grad_out.stride()),
    )
    found = [one.new_empty(batch, one.shape[2], heads, one.shape[3]) for one in (query, key, value)]
    addresses = [one.data_ptr() for one in (grad_out, query, key, value, weights, *found)]
    memory = scratch(sizes.backward_floats)
    _attend_backward(sizes.address, *addresses, _scale(query, scale), memory)
    of_query, of_key, of_value = (one.transpose(1, 2) for one in found)
    return of_query, of_key, of_value


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale
