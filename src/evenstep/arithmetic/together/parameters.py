"""Functions of parameters: they run once for all shards; parameters' gradients are each shard's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from evenstep.arithmetic.arrays import is_float32
from evenstep.arithmetic.sums.convolutions import Window, gradients_by_shard
from evenstep.arithmetic.sums.losses import nll_gradients, nll_losses
from evenstep.arithmetic.sums.products import product_as
from evenstep.arithmetic.together.blocks import Blocks, blocks_of, of_shards, shards_of
from evenstep.arithmetic.together.region import Region
from evenstep.arithmetic.together.rules import examples_of_all, of_examples, rule


@rule("mm")
def mm(region: Region, op: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
    """Return the product of two matrices of each shard, or of all rows with one matrix."""
    return _product(region, a, b, None) if is_float32(a, b) else NotImplemented


@rule("addmm")
def addmm(
    region: Region,
    op: Any,
    addend: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    **factors: Any,
) -> Any:
    """Return a product of matrices, and a row that is added to each of its rows."""
    is_plain = addend.ndim == 1 and blocks_of(addend) is None and not factors
    if not is_plain or not is_float32(addend, a, b) or len(addend) != b.shape[1]:
        return NotImplemented
    return _product(region, a, b, addend)


def _product(region: Region, a: torch.Tensor, b: torch.Tensor, addend: torch.Tensor | None) -> Any:
    shards, of_a, of_b = region.shards, blocks_of(a), blocks_of(b)
    (rows, depth), (across, down) = a.shape, a.stride()
    if depth != b.shape[0] or not (rows and depth and b.shape[1]):
        return NotImplemented
    if of_b is None and of_a is not None:
        step = of_a.nbytes // a.itemsize
        if rows == 1 or step == rows * across:
            rows_of_all = (shards * rows, depth), (step if rows == 1 else across, down)
            product = product_as(a, rows_of_all, b, (b.shape, b.stride()), addend)
            return of_shards(product, shards, rows)
    a_as, b_as = _each(a, of_a, shards), _each(b, of_b, shards)
    return of_shards(product_as(a, a_as, b, b_as, addend), shards)


def _each(
    matrix: torch.Tensor, blocks: Blocks | None, shards: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of all shards' matrices."""
    step = 0 if blocks is None else blocks.nbytes // matrix.itemsize
    return (shards, *matrix.shape), (step, *matrix.stride())


@rule("bmm")
def bmm(region: Region, op: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the products of pairs of matrices."""
    given = [examples_of_all(one, region.shards) for one in (a, b)]
    return of_shards(region.compute(op, *given), region.shards, a.shape[0])


@rule("baddbmm")
def baddbmm(
    region: Region,
    op: Any,
    addend: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    **factors: Any,
) -> torch.Tensor:
    """Return the products of pairs of matrices, and an addend."""
    if addend.ndim != 3 or addend.shape[0] != a.shape[0]:
        return NotImplemented
    given = [examples_of_all(one, region.shards) for one in (addend, a, b)]
    return of_shards(region.compute(op, *given, **factors), region.shards, a.shape[0])


@rule("convolution_backward")
def convolution_backward(
    region: Region,
    op: Any,
    of_out: torch.Tensor,
    source: torch.Tensor,
    weight: torch.Tensor,
    *settings: Any,
) -> Any:
    """Return a convolution's gradients: of the input for all examples, of parameters by shard."""
    if blocks_of(weight) is not None:
        return NotImplemented
    shards = region.shards
    *window_of, (for_source, *for_parameters) = settings
    of_source: Any = None
    found: Any = (None, None)
    if for_source:
        given = [examples_of_all(one, shards) for one in (of_out, source)]
        only = [True, False, False]
        of_source = region.compute(op, *given, weight, *window_of, only)[0]
        of_source = of_examples(of_source, shards)
    if any(for_parameters):
        _, stride, padding, dilation, transposed, _, groups = window_of
        arrays = (shards_of(of_out, shards), shards_of(source, shards), weight)
        is_simple = is_float32(*arrays) and all(one.is_contiguous() for one in arrays)
        if transposed or not is_simple:
            mask = [False, *for_parameters]
            found = region.apart(op, (of_out, source, weight, *window_of, mask), {})[1:]
        else:
            window = Window(tuple(stride), tuple(padding), tuple(dilation), groups)
            each = gradients_by_shard(*arrays, window, for_parameters)
            found = [one if one is None else of_shards(one, shards) for one in each]
    return of_source, *found


@rule("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(
    region: Region,
    op: Any,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
) -> Any:
    """Return each shard's negative log-likelihood, and its total weight."""
    if not _is_likelihood(target, weight, x):
        return NotImplemented
    shards, shape = region.shards, target.shape if reduction == 0 else ()
    given = shards_of(x, shards), shards_of(target, shards)
    results = x.new_empty((shards, *shape)), x.new_empty(shards)
    nll_losses(*given, weight, reduction, ignore_index, *results)
    return tuple(of_shards(one, shards) for one in results)


@rule("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(
    region: Region,
    op: Any,
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total: torch.Tensor,
) -> Any:
    """Return the gradient of each shard's scores."""
    if not _is_likelihood(target, weight, x, grad, total):
        return NotImplemented
    of_out, scores, targets, totals = (
        shards_of(one, region.shards) for one in (grad, x, target, total)
    )
    if not (targets.is_contiguous() and (reduction or of_out.is_contiguous())):
        return NotImplemented
    given = (of_out, scores, targets, weight, reduction, ignore_index, totals)
    return of_shards(nll_gradients(*given), region.shards)


def _is_likelihood(
    target: torch.Tensor, weight: torch.Tensor | None, *numbers: torch.Tensor
) -> bool:
    """Whether C can take the arguments, and class weights are the same for all shards."""
    is_shared = weight is None or blocks_of(weight) is None
    return is_shared and is_float32(weight, *numbers) and target.dtype is torch.int64


@rule("native_layer_norm")
def layer_norm(
    region: Region, op: Any, x: torch.Tensor, shape: Sequence[int], *parameters: Any
) -> Any:
    """Normalise the rows of all shards."""
    if any(isinstance(one, torch.Tensor) and blocks_of(one) for one in parameters):
        return NotImplemented
    found = region.compute(op, shards_of(x, region.shards), shape, *parameters)
    return tuple(of_shards(one, region.shards) for one in found)


@rule("native_layer_norm_backward")
def layer_norm_backward(
    region: Region,
    op: Any,
    grad: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: Sequence[bool],
) -> Any:
    """Return the gradients: of the input for all rows, of parameters by shard."""
    if any(one is not None and blocks_of(one) is not None for one in (weight, bias)):
        return NotImplemented
    of_x, found = None, (None, None)
    if mask[0]:
        g, rows, m, r = (shards_of(one, region.shards) for one in (grad, x, mean, rstd))
        only = [True, False, False]
        of_x = region.compute(op, g, rows, shape, m, r, weight, bias, only)[0]
        of_x = of_shards(of_x, region.shards)
    if any(mask[1:]):
        args = (grad, x, shape, mean, rstd, weight, bias, [False, *mask[1:]])
        found = region.apart(op, args, {})[1:]
    return of_x, *found
