"""Batch, layer, group and weight normalisation, in every variant."""

import copy
import random

import pytest
import torch
from torch import nn

from evenstep.arithmetic.mode import PortableMode
from exact_floats import same
from lane_sums import any_layout, lane_sum

aten = torch.ops.aten
EPS, MOMENTUM = 1e-5, 0.1
ULP = 2.0**-23


def moments(terms):
    """Mean, variance (not divided) and invstd over the first dimension, in double."""
    mean = lane_sum(terms) / len(terms)
    squares = lane_sum((terms.double() - mean) ** 2)
    return mean, squares, (1 / (squares / len(terms) + EPS).sqrt()).float()


def cases(seed, count):
    """Inputs of random shapes and layouts, with channels second, and a generator."""
    rng = random.Random(seed)
    for _ in range(count):
        ndim = rng.choice([2, 3, 4, 4, 5])
        largest = {2: 90, 3: 20, 4: 9, 5: 5}[ndim]
        shape = [rng.randrange(1, largest) for _ in range(ndim)]
        yield any_layout(shape, rng, special=rng.random() < 0.2), rng
    for shape in [(200, 130), (3, 70, 5, 7), (300, 3, 2)]:
        yield any_layout(list(shape), rng, special=False), rng


def parameters(count, rng):
    """Weight and bias, each of which may be absent."""
    return [torch.randn(count) if rng.random() < 0.7 else None for _ in range(2)]


def column(values, x):
    """Values of channels, to be broadcast with an input."""
    return values.view(-1, *[1] * (x.ndim - 2))


def batch_first(x):
    """The terms of each channel: batch and places, in row-major order, by channels."""
    return x.movedim(1, -1).flatten(0, -2)


def by_terms(terms, x):
    """The reverse of `batch_first`."""
    return terms.unflatten(0, (x.shape[0], *x.shape[2:])).movedim(-1, 1)


def scale_of(invstd, weight):
    return invstd if weight is None else invstd * weight


def test_batch_norm_is_its_formula(variant):
    for x, rng in cases(0, 100):
        channels = x.shape[1]
        weight, bias = parameters(channels, rng)
        running = [torch.randn(channels), torch.rand(channels)]
        kept = [one.double() for one in running]
        with PortableMode():
            out, mean, invstd = aten.native_batch_norm(
                *(x, weight, bias, *running, True, MOMENTUM, EPS)
            )
        terms = batch_first(x)
        centre, squares, inverse = moments(terms)
        assert same(mean, centre.float())
        assert same(invstd, inverse)
        shift = 0.0 if bias is None else bias
        right = (terms - mean) * scale_of(invstd, weight) + shift
        assert same(out, by_terms(right, x)), (x.shape, x.stride())
        assert same(running[0], (MOMENTUM * centre + (1 - MOMENTUM) * kept[0]).float())
        own = squares / (len(terms) - 1.0)
        assert same(running[1], (MOMENTUM * own + (1 - MOMENTUM) * kept[1]).float())


def test_batch_norm_in_evaluation_is_its_formula(variant):
    for x, rng in cases(1, 60):
        channels = x.shape[1]
        weight, bias = parameters(channels, rng)
        mean, variance = torch.randn(channels), torch.rand(channels)
        with PortableMode():
            out = aten.native_batch_norm(x, weight, bias, mean, variance, False, MOMENTUM, EPS)[0]
        scale = scale_of((1 / (variance.double() + EPS).sqrt()).float(), weight)
        right = (x - column(mean, x)) * column(scale, x)
        assert same(out, right + (0.0 if bias is None else column(bias, x)))


@pytest.mark.parametrize("train", [True, False])
def test_gradients_of_batch_norm_are_their_formulas(variant, train):
    for x, rng in cases(2, 100):
        channels = x.shape[1]
        g, weight = any_layout(list(x.shape), rng), parameters(channels, rng)[0]
        mean, spread = torch.randn(channels), torch.rand(channels) + 0.5
        given = (None, None, mean, spread) if train else (mean, spread, None, None)
        with PortableMode():
            results = aten.native_batch_norm_backward(g, x, weight, *given, train, EPS, [True] * 3)
            partly = aten.native_batch_norm_backward(
                *(g, x, weight, *given, train, EPS, [False, True, False])
            )
        invstd = spread if train else (1 / (spread.double() + EPS).sqrt()).float()
        own, terms = batch_first(g), batch_first(x)
        s1, s2 = lane_sum(own), lane_sum(own.double() * (terms.double() - mean.double()))
        scale, count, inverse = scale_of(invstd, weight), len(terms), invstd.double()
        if train:
            slope = (s2 / count * inverse * inverse).float()
            right = ((own - (s1 / count).float()) - (terms - mean) * slope) * scale
        else:
            right = own * scale
        assert same(results[0], by_terms(right, x)), (x.shape, x.stride(), g.stride())
        assert same(results[1], (s2 * inverse).float())
        assert same(results[2], s1.float())
        assert same(partly[1], results[1])
        assert partly[0] is partly[2] is None


def test_layer_norm_and_its_gradients_are_their_formulas(variant):
    for x, rng in cases(3, 100):
        kept = rng.randrange(x.ndim)
        shape = x.shape[kept:]
        weight, bias = (
            None if one is None else one.view(shape) for one in parameters(shape.numel(), rng)
        )
        g = any_layout(list(x.shape), rng)
        with PortableMode():
            out, mean, invstd = aten.native_layer_norm(x, shape, weight, bias, EPS)
            results = aten.native_layer_norm_backward(
                *(g, x, shape, mean, invstd, weight, bias, [True] * 3)
            )
        terms, own = (one.reshape(-1, shape.numel()).t() for one in (x, g))
        n = len(terms)
        centre, _, inverse = moments(terms)
        assert same(mean.reshape(-1), centre.float())
        assert same(invstd.reshape(-1), inverse)
        m, s = mean.reshape(-1), invstd.reshape(-1)
        w = torch.ones(n, 1) if weight is None else weight.reshape(n, 1)
        b = torch.zeros(n, 1) if bias is None else bias.reshape(n, 1)
        assert same(out, ((terms - m) * s * w + b).t().reshape(x.shape))
        h = own * w
        s1, s2 = lane_sum(h), lane_sum(h.double() * (terms.double() - m.double()))
        slope = (s2 / n * s.double() * s.double()).float()
        right = ((h - (s1 / n).float()) - (terms - m) * slope) * s
        assert same(results[0], right.t().reshape(x.shape)), (x.shape, shape)
        products = own.double() * ((terms.double() - m.double()) * s.double())
        assert weight is None or same(results[1], lane_sum(products.t()).float().view(shape))
        assert bias is None or same(results[2], lane_sum(own.t()).float().view(shape))


def test_group_norm_and_its_gradients_are_their_formulas(variant):
    for x, rng in cases(4, 100):
        batch, channels = x.shape[:2]
        groups = rng.choice([one for one in range(1, channels + 1) if channels % one == 0])
        weight, bias = parameters(channels, rng)
        g = any_layout(list(x.shape), rng)
        sizes = batch, channels, x[0, 0].numel(), groups
        with PortableMode():
            out, mean, invstd = aten.native_group_norm(x, weight, bias, *sizes, EPS)
            results = aten.native_group_norm_backward(
                *(g, x, mean, invstd, weight, *sizes, [True] * 3)
            )
        centre, _, inverse = moments(x.reshape(batch, groups, -1).movedim(-1, 0))
        assert same(mean, centre.float())
        assert same(invstd, inverse)
        m, s = (one.repeat_interleave(channels // groups, 1)[..., None] for one in (mean, invstd))
        rows, own = x.reshape(batch, channels, -1), g.reshape(batch, channels, -1)
        w = torch.ones(channels, 1) if weight is None else weight[:, None]
        b = torch.zeros(channels, 1) if bias is None else bias[:, None]
        assert same(out, ((rows - m) * (s * w) + b).reshape(x.shape)), (x.shape, groups)
        s1 = lane_sum(own.movedim(-1, 0))
        s2 = lane_sum((own.double() * (rows.double() - m.double())).movedim(-1, 0))
        t1, t2 = (
            ascending((w[:, 0].double() * one).view(batch, groups, -1), -1) for one in (s1, s2)
        )
        n = rows[0].numel() / groups
        slope = (t2 / n * invstd.double() * invstd.double()).float()
        part = (t1 / n).float()
        slope, part = (
            one.repeat_interleave(channels // groups, 1)[..., None] for one in (slope, part)
        )
        assert same(results[0], (((own * w - part) - (rows - m) * slope) * s).reshape(x.shape))
        assert same(results[1], ascending(s2 * s[..., 0].double(), 0).float())
        assert same(results[2], ascending(s1, 0).float())


def ascending(terms, dim):
    """The sum, one term after the other in double."""
    total = torch.zeros((), dtype=torch.float64)
    for one in terms.unbind(dim):
        total = total + one
    return total


def modules():
    torch.manual_seed(0)
    flat, image = torch.randn(12, 8), torch.randn(6, 8, 5, 7)
    last = image.to(memory_format=torch.channels_last)
    volume = torch.randn(3, 4, 3, 4, 5)
    yield "batch norm 1d", nn.BatchNorm1d(8), flat
    yield "batch norm 1d of signals", nn.BatchNorm1d(8), image[..., 0]
    yield "batch norm 2d", nn.BatchNorm2d(8), image
    yield "batch norm 2d, channels last", nn.BatchNorm2d(8), last
    yield "batch norm 2d, plain", nn.BatchNorm2d(8, affine=False, track_running_stats=False), image
    yield "batch norm 3d", nn.BatchNorm3d(4), volume.to(memory_format=torch.channels_last_3d)
    yield "instance norm", nn.InstanceNorm2d(8, affine=True, track_running_stats=True), image
    yield "group norm", nn.GroupNorm(4, 8), image
    yield "group norm, channels last", nn.GroupNorm(2, 8), last
    yield "group norm of rows", nn.GroupNorm(2, 8, affine=False), flat
    yield "layer norm", nn.LayerNorm([5, 7]), image
    yield "layer norm, no bias", nn.LayerNorm(7, bias=False), last
    yield "layer norm, plain", nn.LayerNorm(8, elementwise_affine=False), flat
    yield "rms norm", nn.RMSNorm(8), flat


def named(name):
    return next(one[1:] for one in modules() if one[0] == name)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", [one[0] for one in modules()])
def test_modules_are_near_those_of_float64(variant, name, train):
    module, x = named(name)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    twin, torchs = copy.deepcopy(module).double().train(train), copy.deepcopy(module).train(train)
    module.train(train)
    weight = torch.rand_like(x)
    mine, exact, plain = (one.detach().requires_grad_() for one in (x, x.double(), x.clone()))
    with PortableMode():
        out = module(mine)
        (out * weight).sum().backward()
    right, torchs_out = twin(exact), torchs(plain)
    (right * weight.double()).sum().backward()
    (torchs_out * weight).sum().backward()
    pairs = [(out, right), (mine.grad, exact.grad)]
    pairs += zip(
        (p.grad for p in module.parameters()), (p.grad for p in twin.parameters()), strict=True
    )
    pairs += zip(module.buffers(), twin.buffers(), strict=True)
    for got, wanted in pairs:
        # at most 12 roundings of terms up to 4 times as large as the largest result
        error = (got.double() - wanted).abs().max()
        assert error <= 48 * ULP * wanted.abs().max().clamp_min(1)
    assert out.stride() == torchs_out.stride()
    assert mine.grad.stride() == plain.grad.stride()
    with torch.no_grad(), PortableMode():
        again = copy.deepcopy(module).eval()(x)
    assert not again.requires_grad


def test_weight_norm_is_near_that_of_float64(variant):
    for dim in (0, 1):
        v, g = torch.randn(6, 5), torch.rand(6, 1) if dim == 0 else torch.rand(1, 5)
        mine = [one.clone().requires_grad_() for one in (v, g)]
        exact = [one.double().requires_grad_() for one in (v, g)]
        weight = torch.rand(6, 5)
        with PortableMode():
            out = torch._weight_norm(*mine, dim)
            (out * weight).sum().backward()
        right = torch._weight_norm(*exact, dim)
        (right * weight.double()).sum().backward()
        for got, wanted in (
            (out, right),
            *((a.grad, b.grad) for a, b in zip(mine, exact, strict=True)),
        ):
            assert (got.double() - wanted).abs().max() <= 12 * ULP * wanted.abs().max()


def test_other_forms_of_batch_norm_agree(variant):
    x, weight, bias = torch.randn(5, 4, 6), torch.rand(4), torch.rand(4)
    means, variances = torch.randn(4), torch.rand(4)

    def moving():
        return means.clone(), variances.clone()

    with PortableMode():
        right, running = None, moving()
        right = aten.native_batch_norm(x, weight, bias, *running, True, MOMENTUM, EPS)
        fixed = aten.native_batch_norm(x, weight, bias, *moving(), False, MOMENTUM, EPS)
        updated = moving()
        others = [
            aten._native_batch_norm_legit(x, weight, bias, *updated, True, MOMENTUM, EPS),
            aten._native_batch_norm_legit.no_stats(x, weight, bias, True, MOMENTUM, EPS),
            aten._batch_norm_with_update(x, weight, bias, *moving(), MOMENTUM, EPS),
            aten._native_batch_norm_legit_functional(
                *(x, weight, bias, *moving(), True, MOMENTUM, EPS)
            ),
        ]
        in_evaluation = [
            aten._native_batch_norm_legit_no_training(x, weight, bias, *moving(), MOMENTUM, EPS),
            aten._batch_norm_no_update(x, weight, bias, *moving(), MOMENTUM, EPS),
        ]
        g = torch.ones_like(x)
        given = x, weight, *moving(), *right[1:], True, EPS, [True] * 3
        gradients = aten.native_batch_norm_backward(g, *given)
        reserved = aten.batch_norm_backward(g, *given, torch.empty(0, dtype=torch.uint8))
    for other in others:
        assert all(map(same, other[:3], right))
    assert all(map(same, updated, running))
    assert all(map(same, others[-1][3:], running))
    for other in in_evaluation:
        assert same(other[0], fixed[0])
    assert all(map(same, reserved, gradients))


def test_empty_batches(variant):
    empty, statistics = torch.empty(0, 4, 5), (torch.zeros(4), torch.ones(4))
    with PortableMode():
        with pytest.raises(ValueError, match="needs an example"):
            aten.native_batch_norm(empty, None, None, *statistics, True, MOMENTUM, EPS)
        evaluated = aten.native_batch_norm(empty, None, None, *statistics, False, MOMENTUM, EPS)
        layers = aten.native_layer_norm(empty, [5], None, None, EPS)
        groups = aten.native_group_norm(empty, None, None, 0, 4, 5, 2, EPS)
    assert evaluated[0].shape == layers[0].shape == groups[0].shape == empty.shape
