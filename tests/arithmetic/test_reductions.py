"""Sums and what is made of them: one order, for every shape and layout, in every variant."""

import math
import random
from fractions import Fraction

import pytest
import torch

from evenstep.arithmetic.mode import PortableMode
from evenstep.errors import ModelError
from exact_floats import odd_values, rounded, same
from lane_sums import any_layout, cancelling, lane_sum, terms_of

ULP = 2.0**-23  # one float32 rounding is at most half of it, relative


def variance(t, correction):
    centre = lane_sum(t) / len(t)
    return lane_sum((t.double() - centre) ** 2) / max(0.0, len(t) - correction)


REDUCTIONS = {  # in float64, each operation rounded once: the terms' first dimension is reduced
    "sum": (torch.sum, lane_sum),
    "mean": (torch.mean, lambda t: lane_sum(t) / len(t)),
    "nansum": (torch.nansum, lambda t: lane_sum(t.nan_to_num(0.0, math.inf, -math.inf))),
    "norm 2": (
        lambda x, dim, keepdim: torch.linalg.vector_norm(x, 2, dim, keepdim),
        lambda t: lane_sum(t.double() ** 2).sqrt(),
    ),
    "norm 1": (
        lambda x, dim, keepdim: torch.norm(x, 1, dim, keepdim),
        lambda t: lane_sum(t.double().abs()),
    ),
    "norm 0": (
        lambda x, dim, keepdim: torch.linalg.vector_norm(x, 0, dim, keepdim),
        lambda t: lane_sum((t != 0).double()),
    ),
    "var": (
        lambda x, dim, keepdim: torch.var(x, dim, keepdim=keepdim),
        lambda t: variance(t, 1),
    ),
    "std": (
        lambda x, dim, keepdim: torch.std_mean(x, dim, correction=2.5, keepdim=keepdim)[0],
        lambda t: variance(t, 2.5).sqrt(),
    ),
    "mean of var": (
        lambda x, dim, keepdim: torch.var_mean(x, dim, keepdim=keepdim)[1],
        lambda t: lane_sum(t) / len(t),
    ),
}


def random_shape(rng):
    ndim = rng.choice([1, 1, 2, 2, 2, 3, 3, 4])
    largest = {1: 300, 2: 90, 3: 20, 4: 9}[ndim]
    return [rng.choice([rng.randrange(largest + 1), 1, 16]) for _ in range(ndim)]


def check(name, x, dims, keepdim):
    run, reference = REDUCTIONS[name]
    with PortableMode():
        result = run(x, dims, keepdim)
    expected = reference(terms_of(x, [dim % x.ndim for dim in dims])).float()
    like = x.amax(dims, keepdim) if x.numel() else torch.sum(x, dims, keepdim)
    assert same(result, expected.reshape(like.shape)), (name, x.shape, x.stride(), dims)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_order_is_the_same_for_all_shapes_and_layouts(variant, name):
    rng = random.Random(name)
    for _ in range(150):
        shape = random_shape(rng)
        x = any_layout(shape, rng, special=rng.random() < 0.3)
        dims = rng.sample(range(-len(shape), 0), rng.randrange(1, len(shape) + 1))
        check(name, x, dims, rng.random() < 0.5)


@pytest.mark.parametrize("shape", [(200, 150), (3, 130, 70), (5000,), (2, 33, 5, 7)])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_order_is_the_same_beyond_tiles(variant, name, shape):
    x = cancelling(math.prod(shape), 0).view(shape)
    for dims in [[0], [-1], [*range(len(shape))], [0, -1]][: 4 if len(shape) > 1 else 1]:
        check(name, x, dims, False)


@pytest.mark.slow
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("seed", range(20))
def test_order_is_the_same_for_more_shapes_and_layouts(name, seed):
    rng = random.Random(f"{name} {seed}")
    for _ in range(300):
        shape = random_shape(rng)
        x = any_layout(shape, rng, special=rng.random() < 0.3)
        check(name, x, rng.sample(range(len(shape)), rng.randrange(1, len(shape) + 1)), False)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 100, 1000])
def test_sum_is_that_of_fractions_rounded(variant, count):
    values = torch.randint(-(2**20), 2**20, (count,)).float() * 2.0**-15
    exact = sum(map(Fraction, values.tolist()), Fraction(0))
    with PortableMode():  # such sums are exact in double
        total, mean = values.sum(), values.mean()
    assert total.item() == rounded(exact)
    assert mean.isnan() if not count else mean.item() == rounded(exact / count)


def test_order_of_cancelling_values_shows():
    x = cancelling(30 * 1000, 0).view(30, 1000)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    one, other = lane_sum(x).float(), lane_sum(x[order]).float()
    is_cancelled = one.abs() < 2.0**50
    assert is_cancelled.sum() > 50
    assert (one != other)[is_cancelled].double().mean() > 0.5


def test_sum_of_negative_zeros_is_positive(variant):
    with PortableMode():
        total = torch.full((3, 20), -0.0).sum(0)
    assert not total.signbit().any()


@pytest.mark.parametrize("count", [5, 100, 3000])
def test_doubles_are_summed_in_the_same_order(variant, count):
    x = torch.randn(count, 3, dtype=torch.float64)
    with PortableMode():
        assert torch.equal(x.sum(0), lane_sum(x))
        assert torch.equal(x.t().mean(1), lane_sum(x) / count)
        assert torch.equal(x.float().sum(0, dtype=torch.float64), lane_sum(x.float()))


def test_trace_is_the_sum_of_the_diagonal(variant):
    x = torch.randn(30, 40)
    with PortableMode():
        assert same(x.trace(), lane_sum(x.diagonal()).float())


def test_integers_are_left_to_torch(variant):
    x = torch.arange(12).view(3, 4)
    with PortableMode():
        results = x.sum(0), (x > 3).sum(), x.prod(1), x.cumsum(0), x.mean(dtype=torch.float32)
    expected = x.sum(0), (x > 3).sum(), x.prod(1), x.cumsum(0), torch.tensor(5.5)
    for result, right in zip(results, expected, strict=True):
        assert result.dtype == right.dtype
        assert torch.equal(result, right)


@pytest.mark.parametrize("products", [False, True])
def test_cumulated_values_are_rounded_from_double(variant, products):
    rng = random.Random(0)
    for _ in range(60):
        shape = random_shape(rng)
        x, dim = any_layout(shape, rng), rng.randrange(len(shape))
        sums, steps = torch.tensor(float(products), dtype=torch.float64), []
        for one in x.double().unbind(dim):
            sums = sums * one if products else sums + one
            steps.append(sums.float())
        with PortableMode():
            result = x.cumprod(dim) if products else x.cumsum(dim)
            last = x.prod(dim) if products else None
        assert same(result, torch.stack(steps, dim) if steps else torch.empty(shape))
        if products:
            assert same(last, steps[-1] if steps else torch.ones_like(last))


def test_all_elements_are_multiplied_in_row_major_order(variant):
    x = torch.randn(7, 5)
    with PortableMode():
        assert same(x.t().prod(), x.t().reshape(-1).cumprod(0)[-1])


def log_of_sum_error(x, dim):
    """How far logsumexp may be from the exact value.

    Each term's argument has half an ulp (at most ln n, weighted by the terms), its exponential one,
    the sum half of one, its logarithm one of its own size, the last sum half of one.
    """
    result = x.double().logsumexp(dim)
    part = (result - x.double().amax(dim)).abs()
    count = math.log(max(x.shape[dim], 2))
    return ULP * (1 + 0.5 * count + 0.5 + part + 0.5 * result.abs()) * 1.01


def test_log_of_sum_of_exponentials(variant):
    rng = random.Random(1)
    for _ in range(100):
        shape = [size + 1 for size in random_shape(rng)]
        x, dim = any_layout(shape, rng).nan_to_num(0).clamp(-50, 50), rng.randrange(len(shape))
        with PortableMode():
            result = x.logsumexp(dim)
            moved = x.movedim(dim, -1).contiguous().logsumexp(-1)
        assert same(result, moved)
        error = (result.double() - x.double().logsumexp(dim)).abs()
        assert (error <= log_of_sum_error(x, dim)).all()


@pytest.mark.parametrize(
    "values",
    [[math.inf, 1.0], [-math.inf] * 3, [math.nan, 1.0], [math.inf, -math.inf], [-1e38, 3e38]],
)
def test_log_of_sum_of_special_values(variant, values):
    x = torch.tensor(values)
    with PortableMode():
        result = x.logsumexp(0)
    assert same(result, x.double().logsumexp(0).float())


@pytest.mark.parametrize("order", [3.0, 0.5, -1.0, 2.5])
def test_norms_of_other_orders(variant, order):
    x = torch.rand(50, 7) + 0.5
    exact = torch.linalg.vector_norm(x.double(), order, 0)
    with PortableMode():
        result = torch.linalg.vector_norm(x, order, 0)
    # each power one ulp, the sum half of one, all of it to the power 1 / order; 1 / order itself
    # has half an ulp, which the logarithm of the sum scales
    logarithm = (exact.log() * order).abs()
    error = ULP * (1 + (1.5 + 0.5 * logarithm) / abs(order))
    assert ((result.double() - exact).abs() <= error * exact * 1.01).all()


@pytest.mark.parametrize("order", [math.inf, -math.inf])
def test_norms_that_only_compare(variant, order):
    x = odd_values(200, 3).view(20, 10)
    with PortableMode():
        result = torch.linalg.vector_norm(x, order, 1)
    expected = x.abs().amax(1) if order > 0 else x.abs().amin(1)
    assert same(result, expected)


GRADIENTS = {  # the roundings of the result and of its gradient, each relative to the largest
    "sum": (lambda x: x.sum(1), 1),
    "mean": (lambda x: x.mean((0, 1)), 2),
    "var": (lambda x: x.var(1), 6),
    "std": (lambda x: x.std(1), 8),
    "norm": (lambda x: x.norm(dim=1), 4),
    "norm 1": (lambda x: x.norm(1), 2),
    "cumsum": (lambda x: x.cumsum(1), 2),
    "dist": (lambda x: torch.dist(x, 2 * x.detach()), 6),
    "logsumexp": (lambda x: x.logsumexp(1), 10),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_float64(variant, name):
    run, roundings = GRADIENTS[name]
    x = torch.rand(6, 40) + 0.5
    mine, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    weight = torch.rand(run(x).shape)
    with PortableMode():
        result = run(mine)
        (result * weight).sum().backward()
    right = run(exact)
    (right * weight.double()).sum().backward()
    for got, wanted in ((result, right), (mine.grad, exact.grad)):
        error = (got.double() - wanted).abs().max() / wanted.abs().max()
        assert error <= roundings * ULP


@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
def test_gradients_are_clipped(variant, order):
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) for shape in [(40, 30), (7,), ()]]
    clipped = {}
    for foreach in (True, False):
        parameters = [torch.zeros_like(one, requires_grad=True) for one in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        with PortableMode():
            total = torch.nn.utils.clip_grad_norm_(parameters, 1.0, order, foreach=foreach)
        clipped[foreach] = [total, *(parameter.grad for parameter in parameters)]
    norms = torch.stack([torch.linalg.vector_norm(one.double(), order) for one in gradients])
    total = clipped[True][0]
    exact = torch.linalg.vector_norm(norms, order).item()
    assert abs(total.item() - exact) <= ULP * exact
    assert all(map(same, clipped[True], clipped[False]))
    scale = (total + 1e-6).reciprocal() * 1.0
    assert same(clipped[True][1], gradients[0] * scale)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,), ()])
def test_empty_and_scalar_tensors_are_torchs(variant, shape):
    x = torch.ones(shape)
    for dim in [None, *range(len(shape))]:
        for run in (torch.sum, torch.mean, torch.nansum, torch.linalg.vector_norm, torch.logsumexp):
            where = {"dim": dim} if dim is not None or run is not torch.logsumexp else {"dim": []}
            with PortableMode():
                result = run(x, **where)
            assert same(result, run(x, **where))


def test_wrong_dimensions_are_refused(variant):
    with PortableMode():
        with pytest.raises(IndexError, match="got 2"):
            torch.ones(2, 3).sum(2)
        with pytest.raises(RuntimeError, match="multiple times"):
            torch.ones(2, 3).mean((0, -2))
        with pytest.raises(ModelError, match="logsumexp of float64"):
            torch.ones(2, dtype=torch.float64).logsumexp(0)


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8, torch.bool, torch.int64, None])
def test_a_sum_of_integers_has_the_type_that_is_asked_for(kind):
    for numbers in (torch.arange(300), torch.arange(300.0), torch.arange(300) > 2):
        if kind is None and numbers.is_floating_point():
            continue
        expected = numbers.sum(dtype=kind), numbers.view(3, 100).sum(1, dtype=kind)
        with PortableMode():
            found = numbers.sum(dtype=kind), numbers.view(3, 100).sum(1, dtype=kind)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype is other.dtype
            assert torch.equal(one, other)
