"""Softmax and the losses made of it, in every variant."""

import math
import random

import pytest
import torch
import torch.nn.functional as F

from evenstep.arithmetic.mode import PortableMode
from exact_floats import odd_values, same
from lane_sums import any_layout, cancelling, lane_sum

aten = torch.ops.aten
ULP = 2.0**-23


def portable(function, x):
    with PortableMode():
        return function(x)


def softmax(x, log):
    """The formula for the first dimension, each operation rounded once; exp and log are those of
    single elements, which have tests of their own."""
    largest = x.nan_to_num(-math.inf, math.inf, -math.inf).amax(0)
    shifted = x - largest
    power = portable(torch.exp, shifted)
    total = lane_sum(power).float()
    return shifted - portable(torch.log, total) if log else power / total


def softmax_gradient(g, y, log):
    if log:
        return g - portable(torch.exp, y) * lane_sum(g).float()
    return (g - lane_sum(g.double() * y.double()).float()) * y


def cases(seed, count):
    """Tensors of random shapes and layouts, and a dimension of each."""
    rng = random.Random(seed)
    for _ in range(count):
        ndim = rng.choice([1, 2, 2, 3, 4])
        shape = [rng.randrange(1, {1: 200, 2: 90, 3: 20, 4: 9}[ndim]) for _ in range(ndim)]
        yield any_layout(shape, rng, special=rng.random() < 0.3), rng.randrange(ndim), rng


LARGE = [((3, 9001), 1), ((5000, 2), 1), ((20, 300), 0), ((2, 100, 70), 1), ((1, 4096), 1)]


@pytest.mark.parametrize("log", [False, True])
def test_softmax_is_its_formula(variant, log):
    given = [*cases(0, 120), *((odd_values(math.prod(s), 1).view(s), d, None) for s, d in LARGE)]
    for x, dim, _ in given:
        with PortableMode():
            result = x.log_softmax(dim) if log else x.softmax(dim)
        assert same(result, softmax(x.movedim(dim, 0), log).movedim(0, dim)), (x.shape, dim)


@pytest.mark.parametrize("log", [False, True])
def test_gradient_of_softmax_is_its_formula(variant, log):
    backward = aten._log_softmax_backward_data if log else aten._softmax_backward_data
    given = [*cases(2, 120), *((cancelling(math.prod(s), 1).view(s), d, None) for s, d in LARGE)]
    for g, dim, rng in given:
        y = any_layout(list(g.shape), rng or random.Random(0))
        with PortableMode():
            result = backward(g, y, dim, torch.float32)
        right = softmax_gradient(g.movedim(dim, 0), y.movedim(dim, 0), log)
        assert same(result, right.movedim(0, dim)), (g.shape, dim)


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), ()])
def test_softmax_of_empty_and_scalar_tensors(variant, shape):
    for dim in range(max(1, len(shape))):
        with PortableMode():
            results = torch.ones(shape).softmax(dim), torch.ones(shape).log_softmax(dim)
        assert same(results[0], torch.ones(shape).softmax(dim))
        assert same(results[1], torch.ones(shape).log_softmax(dim))


def softmax_error(x, dim):
    """How far log_softmax may be from the exact value.

    Arguments of exp have half an ulp of their own size (weighted by the terms, at most ln n), exp
    one and the sum half of one, relative; log one of its size; the difference half of its own.
    """
    exact = x.double().log_softmax(dim)
    count = math.log(max(2, x.shape[dim]))
    shift = (x.double() - x.double().amax(dim, keepdim=True)).abs()
    return ULP * (1.5 + 1.5 * count + 0.5 * shift + 0.5 * exact.abs()) * 1.01


EXAMPLES = [((9, 5), (9,)), ((4, 3, 17), (4, 17)), ((2, 7, 5, 6), (2, 5, 6)), ((6,), ())]


def scores(shape, of_targets, seed=0):
    generator = torch.Generator().manual_seed(seed)
    classes = shape[min(1, len(shape) - 1)]
    targets = torch.randint(classes, of_targets, generator=generator)
    return torch.randn(shape, generator=generator), targets, torch.rand(classes) + 0.1


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [-100, 1])
@pytest.mark.parametrize(("shape", "of_targets"), EXAMPLES)
def test_likelihood_is_its_formula(variant, shape, of_targets, ignored, weighted):
    x, targets, weight = scores(shape, of_targets)
    if not weighted:
        weight = None
    own = torch.ones(x.shape[min(1, x.ndim - 1)]) if weight is None else weight
    counted = targets != ignored
    chosen = x.movedim(min(1, x.ndim - 1), -1).gather(-1, targets[..., None])[..., 0]
    terms = -(own[targets].double() * chosen.double()) * counted
    weights = own[targets].double() * counted
    total, sum_of_weights = lane_sum(terms.reshape(-1)), lane_sum(weights.reshape(-1))
    for reduction, expected in (
        ("none", torch.where(counted, -own[targets] * chosen, torch.zeros(()))),
        ("sum", total.float()),
        ("mean", (total / sum_of_weights).float()),
    ):
        options = {"weight": weight, "ignore_index": ignored, "reduction": reduction}
        mine = x.clone().requires_grad_()
        with PortableMode():
            loss = F.nll_loss(mine, targets, **options)
            of_strided = F.nll_loss(x.mT.contiguous().mT if x.ndim > 1 else x, targets, **options)
            gradient = torch.full_like(loss, 0.7)
            loss.backward(gradient)
        assert same(loss.detach(), expected)
        assert same(of_strided, expected)
        shared = gradient / sum_of_weights.float() if reduction == "mean" else gradient
        right = torch.zeros_like(x).movedim(min(1, x.ndim - 1), -1).contiguous()
        slopes = torch.where(counted, -own[targets] * shared, torch.zeros(()))
        right.scatter_(-1, targets[..., None], slopes[..., None])
        assert same(mine.grad, right.movedim(-1, min(1, x.ndim - 1)).contiguous())


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("shape", "of_targets"), EXAMPLES)
def test_cross_entropy_is_near_that_of_float64(
    variant, shape, of_targets, reduction, weighted, smoothing
):
    x, targets, weight = scores(shape, of_targets, 1)
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": 2}
    mine, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    with PortableMode():
        loss = F.cross_entropy(mine, targets, weight if weighted else None, **options)
        loss.sum().backward()
    right = F.cross_entropy(exact, targets, weight.double() if weighted else None, **options)
    right.sum().backward()
    # log_softmax's error of each example (its sum, for the sum), and six more roundings: weights,
    # smoothing, division
    dim = min(1, x.ndim - 1)
    each = softmax_error(x, dim).max() + 6 * ULP * x.double().log_softmax(dim).abs().max()
    largest = weight.max().item() if weighted else 1.0
    many = targets.numel() if reduction == "sum" else 1
    assert ((loss.double() - right).abs() <= each * max(1.0, largest) * many).all()
    error = (mine.grad.double() - exact.grad).abs()
    assert (error <= (softmax_error(x, dim).max() + 8 * ULP) * exact.grad.abs().max()).all()


@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_of_probabilities(variant, weighted):
    x, _, weight = scores((9, 5), (9,), 2)
    shares = torch.rand(9, 5)
    mine, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    with PortableMode():
        loss = F.cross_entropy(mine, shares, weight if weighted else None)
        loss.backward()
    right = F.cross_entropy(exact, shares.double(), weight.double() if weighted else None)
    right.backward()
    error = softmax_error(x, 1).max() + 6 * ULP * right.abs()
    assert (loss.double() - right).abs() <= error * 5  # a sum over five classes
    wrong = (mine.grad.double() - exact.grad).abs().max()
    assert wrong <= (softmax_error(x, 1).max() + 8 * ULP) * exact.grad.abs().max() * 5


def test_targets_out_of_bounds_are_refused(variant):
    x = torch.randn(3, 4)
    for wrong in (4, -1):
        with PortableMode(), pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            F.nll_loss(x, torch.tensor([0, wrong, 1]))
    with PortableMode(), pytest.raises(ValueError, match="need targets of shape"):
        aten.nll_loss_forward(x, torch.zeros(2, dtype=torch.int64), None, 1, -100)


def test_mean_of_no_examples_is_nan(variant):
    x, everything = torch.randn(3, 4), torch.zeros(3, dtype=torch.int64)
    with PortableMode():
        of_none = F.nll_loss(torch.empty(0, 4), torch.empty(0, dtype=torch.int64))
        of_ignored = F.nll_loss(x, everything, ignore_index=0)
    assert of_none.isnan()
    assert of_ignored.isnan()
