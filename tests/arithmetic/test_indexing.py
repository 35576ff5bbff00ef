"""Sums by index: bit for bit those of a loop, and near float64's with their gradients."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional

from arrangements import arranged
from evenstep.arithmetic.mode import PortableMode
from exact_floats import fma, odd, same

aten = torch.ops.aten


def integers(shape, below, seed):
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def numbers(*shape):
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


def looped(base, places, values):
    """Add values one after the other to places of a flattened tensor, but not to those below 0."""
    sums = base.flatten().tolist()
    pairs = zip(
        places.flatten().tolist(), values.expand(places.shape).flatten().tolist(), strict=True
    )
    for place, value in pairs:
        if place >= 0:
            sums[place] = fma(1.0, value, sums[place])
    return torch.tensor(sums, dtype=torch.float32).reshape(base.shape)


def put_case(shape, indices, *values):
    rows = odd(*values, seed=1)
    places = numbers(*shape)[tuple(slice(None) if one is None else one for one in indices)]
    return odd(*shape), rows, places, lambda x, v: aten.index_put(x, indices, v, True)


def add_case(shape, dim, count):
    at = integers((count,), shape[dim], 3)
    sizes = [*shape]
    sizes[dim] = count
    places = numbers(*shape).index_select(dim, at)
    return odd(*shape), odd(*sizes, seed=1), places, lambda x, v: x.index_add(dim, at, v)


def scatter_case(shape, dim, index_shape, src_shape=None):
    at = integers(index_shape, shape[dim], 4)
    sources = odd(*(src_shape or index_shape), seed=1)
    # A gather needs the whole of the other dimensions, as a scatter does not.
    crop = tuple(slice(size if axis != dim else None) for axis, size in enumerate(index_shape))
    places = numbers(*shape)[crop].gather(dim, at)
    part = tuple(slice(size) for size in index_shape)

    def run(x, v):
        return x.scatter_add(dim, at, v)

    return odd(*shape), sources, (places, part), run


def row_case(shape, dim, index_shape):
    at = integers(index_shape, shape[dim], 4)
    at = at[(..., *(None,) * (len(shape) - dim - 1))]
    at = at.expand(*index_shape, *shape[dim + 1 :])
    places = numbers(*shape).gather(dim, at)
    return odd(*shape), odd(*at.shape, seed=1), places, lambda x, v: x.scatter_add(dim, at, v)


CASES = {
    "index_add, first dimension": add_case((5, 7), 0, 40),
    "index_add, last dimension": add_case((5, 7), 1, 40),
    "index_add, middle": add_case((3, 4, 6), 1, 17),
    "index_add, vector": add_case((6,), 0, 50),
    "scatter_add, first dimension": scatter_case((5, 7), 0, (30, 7)),
    "scatter_add, last dimension": scatter_case((5, 7), 1, (5, 40)),
    "scatter_add, smaller index": scatter_case((5, 7, 4), 1, (3, 20, 2), (4, 21, 5)),
    "scatter_add, rows": row_case((5, 7), 0, (30,)),
    "scatter_add, rows of blocks": row_case((3, 5, 2, 2), 1, (3, 30)),
    "index_put, rows": put_case((5, 7), [integers((30,), 5, 5)], 30, 7),
    "index_put, from the end": put_case((5, 7), [integers((30,), 10, 5) - 5], 30, 7),
    "index_put, one value": put_case((5, 7), [integers((30,), 5, 5)]),
    "index_put, columns": put_case((3, 5, 4), [None, integers((20,), 5, 5)], 3, 20, 4),
    "index_put, neighbours": put_case(
        (2, 5, 4, 3), [None, integers((6, 1), 5, 5), integers((9,), 4, 6)], 2, 6, 9, 3
    ),
    "index_put, apart": put_case(
        (5, 2, 4), [integers((6, 9), 5, 5), None, integers((9,), 4, 6)], 6, 9, 2
    ),
    "index_put, mask": put_case((5, 7), [integers((5, 7), 2, 8).bool()]),
}


@pytest.mark.parametrize("name", CASES)
def test_sums_are_those_of_a_loop(variant, name):
    base, values, places, run = CASES[name]
    before = base.clone()
    places, part = places if isinstance(places, tuple) else (places, ...)
    expected = looped(base, places, values[part] if values.ndim else values)
    for x, v in itertools.product(arranged(base), arranged(values)):
        with PortableMode():
            assert same(run(x, v), expected)
    assert same(base, before)


def test_sums_in_place():
    base, rows, at = odd(5, 7), odd(30, 7, seed=1), integers((30,), 5, 5)
    expected = looped(base, numbers(5, 7)[at], rows)
    for run in (
        lambda x: x.index_add_(0, at, rows),
        lambda x: x.index_put_((at,), rows, accumulate=True),
        lambda x: x.scatter_add_(0, at[:, None].expand(30, 7), rows),
        lambda x: x.put_(numbers(5, 7)[at], rows, accumulate=True),
        lambda x: aten._index_put_impl_(x, [at], rows, True, True),
    ):
        for x in arranged(base):
            own = torch.empty_like(x).copy_(x) if x.is_contiguous() else x.clone()
            with PortableMode():
                assert run(own) is own
            assert same(own, expected)


@pytest.mark.parametrize("padding_idx", [-1, 2])
@pytest.mark.parametrize("width", [1, 3, 16, 67])
def test_embedding(variant, padding_idx, width):
    at, grad = integers((9, 6), 5, 5), odd(9, 6, width)
    places = torch.where(at == padding_idx, -1, at)[..., None] * width + torch.arange(width)
    expected = looped(torch.zeros(5, width), places, grad)
    counts = torch.bincount(at.flatten(), minlength=5)[:, None].clamp(min=1)
    for rows in arranged(grad):
        with PortableMode():
            assert same(aten.embedding_dense_backward(rows, at, 5, padding_idx, False), expected)
            scaled = aten.embedding_dense_backward(rows, at, 5, padding_idx, True)
        assert same(scaled, expected / counts)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_embeddings(variant, mode):
    weight, at, offsets = odd(8, 5), integers((20,), 8, 5), torch.tensor([0, 0, 7, 7, 12])
    bag = torch.bucketize(torch.arange(20), offsets, right=True) - 1
    used = torch.where(at == 3, -1, bag)
    places = torch.where(used < 0, -1, used)[:, None] * 5 + torch.arange(5)
    places = torch.where(used[:, None] < 0, -1, places)
    expected = looped(torch.zeros(5, 5), places, weight[at])
    if mode == "mean":
        expected = expected / torch.bincount(bag[used >= 0], minlength=5).clamp(min=1)[:, None]
    with PortableMode():
        result = functional.embedding_bag(at, weight, offsets, mode=mode, padding_idx=3)
    assert same(result, expected)


OVERLAPS = {
    "unfold": ((3, 20), lambda x: x.unfold(1, 5, 2).permute(2, 0, 1), lambda x: x.unfold(1, 5, 2)),
    "unfold, first dimension": (
        (9, 4),
        lambda x: x.unfold(0, 3, 1).permute(2, 0, 1),
        lambda x: x.unfold(0, 3, 1),
    ),
    **{
        f"im2col {options}": (
            (2, 3, 8, 7),
            lambda x, options=options: functional.unfold(x + 1, *options) - 1,
            lambda x, options=options: functional.unfold(x, *options),
        )
        for options in [((3, 2),), ((3, 3), (2, 1), (1, 1), (1, 2)), (2, 1, 0, 3)]
    },
    **{
        f"{mode} {padding}": (
            shape,
            lambda x, mode=mode, padding=padding: functional.pad(x, padding, mode=mode),
            lambda x, mode=mode, padding=padding: functional.pad(x, padding, mode=mode),
        )
        for mode in ("reflect", "replicate")
        for padding, shape in (((3, 2), (2, 2, 5)), ((1, 2, 3, 0), (2, 2, 5, 4)))
    },
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_gradients_of_overlapping_moves(variant, name):
    shape, places, run = OVERLAPS[name]
    at = places(numbers(*shape).double()).to(torch.int64)
    x = torch.zeros(shape, requires_grad=True)
    with PortableMode():
        result = run(x)
        grad = odd(*result.shape)
        (found,) = torch.autograd.grad(result, x, grad)
    if name.startswith("unfold"):
        grad = grad.movedim(-1, 0)  # places in a window first
    assert same(found, looped(torch.zeros(shape), at, grad))


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("include_self", [True, False])
def test_scatter_reduce(reduce, include_self):
    base, src, at = odd(4, 3), odd(9, 3, seed=1), integers((9, 3), 3, 5)
    with PortableMode():
        result = base.scatter_reduce(0, at, src, reduce, include_self=include_self)
    start = base if include_self else base.scatter(0, at, 0.0)
    expected = looped(start, numbers(4, 3).gather(0, at), src)
    if reduce == "mean":
        counts = torch.zeros(4, 3).scatter_add(0, at, torch.ones(9, 3)) + include_self
        expected = expected / counts.clamp(min=1)
    assert same(result, expected)


WRONG = {
    "index_add": lambda x: x.index_add(0, torch.tensor([5]), x[:1]),
    "index_add, below 0": lambda x: x.index_add(0, torch.tensor([-1]), x[:1]),
    "scatter_add": lambda x: x.scatter_add(1, torch.tensor([[7]]), x),
    "index_put": lambda x: x.index_put((torch.tensor([5]),), x[0], accumulate=True),
    "index_put, second": lambda x: x.index_put(
        (torch.tensor([0]), torch.tensor([8])), x[0, 0], accumulate=True
    ),
    "index_put, below 0": lambda x: x.index_put((torch.tensor([-6]),), x[0], accumulate=True),
    "put": lambda x: x.put(torch.tensor([35]), x[0, 0], accumulate=True),
    "embedding": lambda x: aten.embedding_dense_backward(x, torch.tensor([5] * 5), 5, -1, False),
}


@pytest.mark.parametrize("name", WRONG)
def test_places_out_of_bounds_are_refused(name):
    with PortableMode(), pytest.raises(IndexError, match="out of bounds"):
        WRONG[name](torch.ones(5, 7))


def test_empty_sums():
    x = odd(5, 7)
    none = torch.zeros(0, dtype=torch.int64)
    with PortableMode():
        assert same(x.index_add(0, none, x[:0]), x)
        assert same(x.scatter_add(0, none.view(0, 7), x), x)
        assert same(x.index_put((none,), x[:0], accumulate=True), x)
        assert same(x[:, :0].index_add(0, torch.tensor([1]), x[:1, :0]), x[:, :0])
        assert aten.embedding_dense_backward(x[:0], none, 3, -1, False).tolist() == [[0.0] * 7] * 3


GRADIENTS = {
    "gather": lambda x: x.gather(1, integers((5, 30), 7, 1)),
    "index_select": lambda x: x.index_select(0, integers((30,), 5, 1)),
    "index": lambda x: x[integers((30,), 5, 1), integers((4, 1), 7, 2)],
    "take": lambda x: x.take(integers((30,), 35, 1)),
    "embedding": lambda x: functional.embedding(integers((30,), 5, 1), x),
    "embedding_bag": lambda x: functional.embedding_bag(integers((6, 5), 5, 1), x, mode="mean"),
    "index_add": lambda x: x.index_add(0, integers((5,), 5, 1), x, alpha=0.3),
    "scatter_reduce": lambda x: x.scatter_reduce(1, integers((5, 7), 7, 1), x, "mean"),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_near_those_of_float64(name):
    """A sum of at most 40 numbers below 4 is off by at most 40 roundings of numbers below 160."""
    found = []
    for dtype, mode in ((torch.float32, PortableMode()), (torch.float64, nullcontext())):
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        with mode:
            result = GRADIENTS[name](x)
            weights = torch.linspace(-1, 1, result.numel(), dtype=dtype).view(result.shape)
            found.append([result, *torch.autograd.grad(result, x, weights)])
    for one, other in zip(*found, strict=True):
        assert float((one.double() - other).detach().abs().max()) < 40 * 160 * 2**-24
