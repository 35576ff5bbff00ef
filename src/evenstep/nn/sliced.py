"""A product computed slice by slice: what is cut, what is concatenated, and what is added.

Every slice is computed from tensors of exactly its own shape, with strides of their own and 64-byte
aligned, so that its bits don't depend on where they were cut from. Sums over slices, of partial
results and of gradients with respect to a shared input, are taken in the canonical tree.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from evenstep.collectives import tree_sum
from evenstep.collectives.tree import split_point
from evenstep.devices.addresses import ALIGNMENT
from evenstep.nn.products import Product, Slice, Wanted
from evenstep.nn.slice_runners import (
    ONE_BY_ONE,
    Argument,
    KeptPart,
    Result,
    SliceRunner,
    runner_here,
)

Keys: TypeAlias = "tuple[int | None, ...]"
"""The `id` of a layer's weight and of its bias, while they are parameters."""


def compute_sliced(
    product: Product, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the output of a layer that is cut as `product` says.

    The runner of the calling thread computes the slices, in forward and backward. In traced code,
    and in a backward pass with `create_graph=True`, the calling thread computes them. Slices add
    the bias if the outputs are cut; otherwise it is added after the sum.
    """
    keys = tuple(id(one) if isinstance(one, nn.Parameter) else None for one in (weight, bias))
    if product.multiplies:
        x, weight, bias = _as_autocast(x, weight, bias)
    if product.input_parts == 1:
        x = _by_itself(x, _format_of(x))
    if product.along == "outputs":
        return _run(product, keys, x, weight, bias)
    partial = _run(product, keys, x, weight, None)
    if bias is None:
        return partial
    shape = [1] * partial.dim()
    shape[product.output_dim] = -1
    return partial + bias.view(shape)


def _run(product: Product, keys: Keys, *tensors: torch.Tensor | None) -> torch.Tensor:
    output: torch.Tensor = _Sliced.apply(product, keys, *tensors)  # type: ignore[no-untyped-call]
    return output


class _Sliced(torch.autograd.Function):
    """The output of a layer from the results of its slices, and the gradients from theirs."""

    @staticmethod
    def forward(
        ctx: Any,
        product: Product,
        keys: Keys,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.given = product, keys, bias is not None
        ctx.save_for_backward(x, weight if product.multiplies else None)
        formats = _Formats.of(x, weight)
        function = functools.partial(_forward_slice, product, formats)
        inputs = _spread(product, _parts(x, product.input_parts, product.input_dim))
        weights = _held(product, keys[0], weight, product.weight_dim)
        biases = _held(product, keys[1], bias, 0)
        with _without_autocast(x):
            found = _runner().run(function, [*zip(inputs, weights, biases, strict=True)])
        results = [one for (one, *_) in found if one is not None]
        if product.along == "outputs":
            return torch.cat(results, product.output_dim)
        total = tree_sum(results, torch.add)
        assert total is not None
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        product, keys, has_bias = ctx.given
        x, weight = ctx.saved_tensors
        (dy,) = gradients
        needed = ctx.needs_input_grad
        wanted = needed[2], needed[3], has_bias and needed[4]
        function = functools.partial(_backward_slice, product, _Formats.of(x, weight), wanted)
        inputs = _spread(product, _parts(x, product.input_parts, product.input_dim))
        weights = _held(product, keys[0], weight, product.weight_dim)
        if product.along == "outputs":
            slopes = _parts(dy, product.slices, product.output_dim)
        else:
            slopes = _copies(_by_itself(dy, _format_of(x)), product.slices)
        with _without_autocast(x):
            found = _runner().run(function, [*zip(slopes, inputs, weights, strict=True)])
        dx, d_weight, d_bias = zip(*found, strict=True)
        return (
            None,
            None,
            _gradient_of_input(product, dx) if wanted[0] else None,
            torch.cat(d_weight, product.weight_dim) if wanted[1] else None,
            torch.cat(d_bias) if wanted[2] else None,
        )


class _Formats(NamedTuple):
    """The memory formats of a layer's input and weight; a weight that is only copied has none."""

    x: torch.memory_format
    weight: torch.memory_format | None

    @classmethod
    def of(cls, x: torch.Tensor, weight: torch.Tensor | None) -> _Formats:
        return cls(_format_of(x), None if weight is None else _format_of(weight))


def _forward_slice(
    product: Product,
    formats: _Formats,
    number: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> Result:
    x = _by_itself(x, formats.x)
    if product.multiplies and formats.weight is not None:
        weight = _by_itself(weight, formats.weight)
    if bias is not None:
        bias = _by_itself(bias, torch.contiguous_format)
    return (product.forward(Slice(number, x, weight, bias)),)


def _backward_slice(
    product: Product,
    formats: _Formats,
    wanted: Wanted,
    number: int,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
) -> Result:
    dy, x = (_by_itself(one, formats.x) for one in (dy, x))
    if weight is not None and formats.weight is not None:
        weight = _by_itself(weight, formats.weight)
    return product.backward(Slice(number, x, weight), dy, wanted)


def _gradient_of_input(product: Product, found: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the gradient of the input: for each part, the sum over the slices that read it."""
    readers = product.slices // product.input_parts
    parts = [
        tree_sum(found[first : first + readers], torch.add)
        for first in range(0, product.slices, readers)
    ]
    return torch.cat(parts, product.input_dim)  # type: ignore[arg-type]


# ---- parts of tensors


def _parts(tensor: torch.Tensor, count: int, dim: int) -> Sequence[torch.Tensor]:
    return (tensor,) if count == 1 else tensor.split(tensor.shape[dim] // count, dim)


def _held(
    product: Product, key: int | None, tensor: torch.Tensor | None, dim: int
) -> Sequence[Argument]:
    """Return each slice's part of a weight or a bias: of a parameter, a part to be kept.

    `key` is the `id` of the parameter; None if `tensor` is computed in each forward pass.
    """
    if tensor is None:
        return [None] * product.slices
    parts = _parts(tensor, product.slices, dim)
    if key is None:
        return parts
    known = key, tensor.dtype, product
    return [KeptPart((*known, number), part) for number, part in enumerate(parts)]


def _spread(product: Product, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return each slice's part of the input."""
    readers = product.slices // len(parts)
    return [one for part in parts for one in _copies(part, readers)]


def _copies(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return a tensor `count` times, so that autograd adds its gradients in the canonical tree.

    Autograd adds the gradients of what reads a tensor in an order of its own. So where it records,
    each tensor that is returned is a leaf of a tree of views with two readers each.
    """
    if not torch.is_grad_enabled() or not tensor.requires_grad:
        return [tensor] * count
    node = tensor.view_as(tensor)
    if count == 1:
        return [node]
    middle = split_point(0, count)
    return _copies(node, middle) + _copies(node, count - middle)


def _format_of(tensor: torch.Tensor) -> torch.memory_format:
    """Return channels-last for images (or kernels) that can't be read as contiguous ones."""
    last = torch.channels_last
    is_last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=last)
    return last if is_last and not tensor.is_contiguous() else torch.contiguous_format


def _by_itself(tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """Return a tensor in memory of its own, dense and aligned: `tensor` if it is, or a copy."""
    if tensor.dim() != 4:
        memory_format = torch.contiguous_format
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and not _is_traced()
    if (
        is_plain
        and tensor.stride() == _strides(tensor.shape, memory_format)
        and tensor.data_ptr() % ALIGNMENT == 0
    ):
        return tensor
    return tensor.clone(memory_format=memory_format)


def _strides(shape: Sequence[int], memory_format: torch.memory_format) -> tuple[int, ...]:
    """Return the strides of a new tensor."""
    dims = (1, 3, 2, 0) if memory_format == torch.channels_last else range(len(shape) - 1, -1, -1)
    strides, step = [0] * len(shape), 1
    for dim in dims:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


# ---- the calling thread


def _runner() -> SliceRunner:
    return ONE_BY_ONE if _is_traced() or torch.is_grad_enabled() else runner_here.get()


def _is_traced() -> bool:
    return torch.compiler.is_compiling()


def _as_autocast(*tensors: torch.Tensor | None) -> Any:
    """Return tensors in the dtype that autocast gives the inputs of products."""
    first = tensors[0]
    assert first is not None
    kind = first.device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return [
        one.to(dtype)
        if one is not None and one.is_floating_point() and one.dtype is not torch.float64
        else one
        for one in tensors
    ]


def _without_autocast(tensor: torch.Tensor) -> AbstractContextManager[object]:
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
