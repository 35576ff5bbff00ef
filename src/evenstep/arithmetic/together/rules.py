"""Operations that run once for all shards: those that compute element by element, or row by row.

In portable arithmetic, what an operation gives for one row doesn't depend on how many rows there
are. So each of these has the bits that it has for a shard alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from evenstep.arithmetic.operations import operation
from evenstep.arithmetic.together.blocks import (
    NotTogetherError,
    blocks_of,
    flat_of_shards,
    of_shards,
    shards_of,
    whole,
)
from evenstep.arithmetic.together.region import OTHER_RULES, RULES, Region, Rule
from evenstep.private_torch.dispatch import arguments_of, written_by

aten = torch.ops.aten


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Let a function run operations for all shards at once.

    Args:
        names: the operations, such as "mm" or "sum.dim_IntList".
    """

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(filter(None, map(operation, names)), function))
        return function

    return register


# ---- element by element


def elementwise(region: Region, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation whose tensors are broadcast, with the shards as their first dimension."""
    found = NotImplemented if kwargs else _in_a_row(region, op, args)
    if found is not NotImplemented:
        return found
    given = _broadcast(args, kwargs)
    if given is NotImplemented:
        return given
    result = region.compute(op, *given, **kwargs)
    if isinstance(result, torch.Tensor):
        return of_shards(result, region.shards)
    return type(result)([of_shards(one, region.shards) for one in result])


def elementwise_in_place(region: Region, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run such an operation that writes to its first argument."""
    given = _broadcast(args, kwargs)
    if given is NotImplemented:
        return given
    region.compute(op, *given, **kwargs)
    return args[0]


def _in_a_row(region: Region, op: Any, args: Sequence[Any]) -> Any:
    """Run an operation on all numbers in a row, where all tensors are contiguous and alike."""
    given, like, shape = [], None, None
    for one in args:
        if isinstance(one, torch.Tensor):
            blocks = blocks_of(one)
            if blocks is None or blocks.nbytes != one.nbytes or not one.is_contiguous():
                return NotImplemented
            if like is None:
                like, shape = one, one.shape
            elif one.shape != shape:
                return NotImplemented
            given.append(one.as_strided((region.shards * one.numel(),), (1,)))
        else:
            given.append(one)
    if like is None:
        return NotImplemented
    result = region.compute(op, *given)
    if not isinstance(result, torch.Tensor):
        return NotImplemented
    return flat_of_shards(result, region.shards, like)


def _broadcast(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return arguments with the shards as the first dimension of tensors that stand for them."""
    ndim, dtype, is_mixed, has_scalars = 0, None, False, False
    for one in args:
        if isinstance(one, torch.Tensor):
            is_mixed = is_mixed or dtype not in (None, one.dtype)
            dtype = one.dtype
            has_scalars = has_scalars or one.ndim == 0
            ndim = max(ndim, one.ndim)
        elif isinstance(one, list | tuple) and any(isinstance(i, torch.Tensor) for i in one):
            return NotImplemented
    if (is_mixed and has_scalars) or any(isinstance(i, torch.Tensor) for i in kwargs.values()):
        return NotImplemented  # tensors without dimensions are promoted differently
    if kwargs.get("memory_format") in (torch.channels_last, torch.channels_last_3d):
        return NotImplemented
    given = []
    for one in args:
        if isinstance(one, torch.Tensor) and (blocks := blocks_of(one)) is not None:
            given.append(whole(one, blocks, ndim))
        else:
            given.append(one)
    return given


@functools.cache
def _writes(op: Any) -> bool:
    return bool(written_by(op))


_ELEMENTWISE = """
    _to_copy copy_ fill_ zero_ elu_backward hardtanh_backward hardswish_backward
    hardsigmoid_backward log_sigmoid_backward softshrink_backward hardshrink_backward
    masked_fill masked_fill_ where
"""
_OF_NUMBERS = ("aten::masked_fill.Tensor", "aten::masked_fill_.Tensor")  # without dimensions
_OF_ALL = "aten::equal"  # which torch calls pointwise


def _is_elementwise(op: Any) -> bool:
    name = op.name().removeprefix("aten::").partition(".")[0]
    written = [place for place, _ in written_by(op)]
    arguments = arguments_of(op)
    is_more = any(one.is_out or one.name in ("reduction", "dim", "dims") for one in arguments)
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    return (
        (torch.Tag.pointwise in op.tags or name in _ELEMENTWISE.split())
        and written in ([], [0])
        and not (is_more or is_random or name.startswith("_foreach_"))
        and op.name() not in (*_OF_NUMBERS, _OF_ALL)
    )


@OTHER_RULES.append
def _rule_of_elements(op: Any) -> Rule | None:
    if not _is_elementwise(op):
        return None
    return elementwise_in_place if written_by(op) else elementwise


# ---- along a dimension of each shard


def along(region: Region, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation that takes dimensions by number, of which the shards' is one more."""
    places = _dims_of(op)
    first = next(one for one in _flat(args) if isinstance(one, torch.Tensor))
    ndim = first.ndim
    if not ndim:
        return NotImplemented
    given = [_with_shards(one, region.shards, ndim) for one in args]
    if any(one is NotImplemented for one in given):
        return NotImplemented
    for place, name, default in places:
        dims = args[place] if place < len(args) else kwargs.get(name, default)
        moved = _behind_shards(dims, ndim)
        if place < len(given):
            given[place] = moved
        else:
            kwargs[name] = moved
    result = region.compute(op, *given, **kwargs)
    if _writes(op):
        return args[0]
    if isinstance(result, torch.Tensor):
        return of_shards(result, region.shards)
    return type(result)([of_shards(one, region.shards) for one in result])


def _with_shards(value: Any, shards: int, ndim: int) -> Any:
    if isinstance(value, torch.Tensor):
        return shards_of(value, shards) if value.ndim == ndim else NotImplemented
    if isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
        found = [_with_shards(one, shards, ndim) for one in value]
        return NotImplemented if any(one is NotImplemented for one in found) else found
    return value


def _behind_shards(dims: Any, ndim: int) -> Any:
    if isinstance(dims, int):
        return dims + 1 if dims >= 0 else dims
    if dims is None or len(dims) == 0:
        return [*range(1, ndim + 1)]
    return [one + 1 if one >= 0 else one for one in dims]


def _flat(values: Sequence[Any]) -> Any:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


@functools.cache
def _dims_of(op: Any) -> list[tuple[int, str, Any]]:
    """Return place, name and default of the arguments that are dimensions."""
    found = enumerate(arguments_of(op))
    return [
        (place, one.name, one.default_value if one.has_default_value() else None)
        for place, one in found
        if one.name in ("dim", "dims")
    ]


rule(
    *("amax", "amin", "any.dim", "all.dim", "any.dims", "all.dims"),
    *("max.dim", "min.dim", "var.correction", "std.correction", "var_mean.correction"),
    *("std_mean.correction", "logsumexp", "linalg_vector_norm", "prod.dim_int", "nansum"),
    *("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"),
    *("cumsum", "cumprod", "sort", "sort.stable", "topk", "cat", "gather"),
    *("scatter_add", "scatter_add_", "scatter.src", "scatter.value", "scatter_.src"),
    *("scatter_.value", "glu", "glu_backward", "median.dim"),
)(along)


def _stack(region: Region, op: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    given = [shards_of(one, region.shards) for one in tensors]
    moved = dim + 1 if dim >= 0 else dim
    return of_shards(region.compute(op, given, moved), region.shards)


rule("stack")(_stack)


@rule("sum.dim_IntList", "mean.dim")
def of_dims(
    region: Region, op: Any, x: torch.Tensor, dim: Any, keepdim: bool = False, **kwargs: Any
) -> Any:
    """Sum along dimensions of each shard."""
    if not x.ndim:
        return NotImplemented
    dims = _behind_shards(dim, x.ndim)
    return of_shards(
        region.compute(op, shards_of(x, region.shards), dims, keepdim, **kwargs), region.shards
    )


@rule("sum", "mean", "max", "min", "any", "all")
def of_all_elements(region: Region, op: Any, x: torch.Tensor, **kwargs: Any) -> Any:
    """Reduce all elements of each shard to one."""
    named = _REDUCED_TO[op.name().removeprefix("aten::")]
    given = shards_of(x, region.shards)
    given = given if given.ndim > 1 else given.unsqueeze(1)
    dims = [*range(1, given.ndim)]
    return of_shards(region.compute(operation(named), given, dims, **kwargs), region.shards)


_REDUCED_TO = {
    "sum": "sum.dim_IntList",
    "mean": "mean.dim",
    "max": "amax",
    "min": "amin",
    "any": "any.dims",
    "all": "all.dims",
}


@rule("flip")
def flip(region: Region, op: Any, x: torch.Tensor, dims: Sequence[int]) -> Any:
    """Reverse the order along dimensions."""
    moved = [one + 1 if one >= 0 else one for one in dims]
    found = region.compute(op, shards_of(x, region.shards), moved) if x.ndim else None
    return NotImplemented if found is None else of_shards(found, region.shards)


@rule("argmax", "argmin")
def place_of_extreme(
    region: Region, op: Any, x: torch.Tensor, dim: int | None = None, keepdim: bool = False
) -> Any:
    """Return the place of the largest or smallest element along a dimension."""
    if dim is None or not x.ndim:
        return NotImplemented
    moved = dim + 1 if dim >= 0 else dim
    found = region.compute(op, shards_of(x, region.shards), moved, keepdim)
    return of_shards(found, region.shards)


# ---- row by row


def rowwise(per_example: Sequence[int], *names: str) -> None:
    """Let operations run once on the examples of all shards.

    Args:
        per_example: the places of the arguments whose first dimension counts examples. Further
            tensors must be the same for all shards.
        names: the operations.
    """

    def run(region: Region, op: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args]
        for place, one in enumerate(args):
            if not isinstance(one, torch.Tensor):
                continue
            if place in per_example:
                given[place] = examples_of_all(one, region.shards)
            elif blocks_of(one) is not None:
                return NotImplemented
        result = region.compute(op, *given, **kwargs)
        return of_examples(result, region.shards)

    rule(*names)(run)


def examples_of_all(tensor: torch.Tensor, shards: int) -> torch.Tensor:
    """Return a tensor of all shards' examples, in their order, as its first dimension."""
    blocks = blocks_of(tensor)
    if blocks is None:
        return tensor.expand(shards, *tensor.shape).flatten(0, 1)
    stride, examples = blocks.nbytes // tensor.itemsize, tensor.shape[0]
    if examples > 1 and stride != examples * tensor.stride(0):
        return whole(tensor, blocks).flatten(0, 1)
    step = stride if examples == 1 else tensor.stride(0)
    return tensor.as_strided((shards * examples, *tensor.shape[1:]), (step, *tensor.stride()[1:]))


def of_examples(result: Any, shards: int) -> Any:
    """Return what stands for the shards, from tensors of all shards' examples."""
    if isinstance(result, torch.Tensor):
        return of_shards(result, shards, result.shape[0] // shards)
    return type(result)([one if one is None else of_examples(one, shards) for one in result])


rowwise(
    [0],
    *("convolution", "_convolution", "avg_pool2d", "_adaptive_avg_pool2d", "pixel_shuffle"),
)


@rule("max_pool2d_with_indices", "upsample_nearest2d", "upsample_bilinear2d")
def of_images(region: Region, op: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on a batch of images."""
    if x.ndim != 4:
        return NotImplemented
    return of_examples(
        region.compute(op, examples_of_all(x, region.shards), *args, **kwargs), region.shards
    )


@rule("max_pool2d_with_indices_backward")
def of_pooled(region: Region, op: Any, grad: torch.Tensor, x: torch.Tensor, *args: Any) -> Any:
    """Return the gradient of a batch of images; the places of the largest elements come last."""
    if x.ndim != 4:
        return NotImplemented
    *window, places = args
    given = [examples_of_all(one, region.shards) for one in (grad, x, places)]
    result = region.compute(op, given[0], given[1], *window, given[2])
    return of_examples(result, region.shards)


@rule("avg_pool2d_backward", "_adaptive_avg_pool2d_backward")
def of_averaged(region: Region, op: Any, grad: torch.Tensor, x: torch.Tensor, *args: Any) -> Any:
    """Return the gradient of a batch of images."""
    if x.ndim != 4:
        return NotImplemented
    given = [examples_of_all(one, region.shards) for one in (grad, x)]
    return of_examples(region.compute(op, *given, *args), region.shards)


@rule("_pack_padded_sequence")
def pack(region: Region, op: Any, x: torch.Tensor, lengths: torch.Tensor, *args: Any) -> Any:
    """Refuse lengths of each shard: torch's recurrent layers read what they give by its address."""
    if blocks_of(lengths) is not None:
        raise NotTogetherError("the lengths of packed sequences")
    return NotImplemented


@rule("embedding")
def embedding(
    region: Region, op: Any, table: torch.Tensor, places: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Look up rows of a table that is the same for all shards."""
    if blocks_of(table) is not None:
        return NotImplemented
    given = shards_of(places, region.shards)
    return of_shards(region.compute(op, table, given, *args, **kwargs), region.shards)
