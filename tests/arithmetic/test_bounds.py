"""Kernels in C get addresses and sizes: nothing outside of a tensor is read or written."""

import pytest
import torch
from torch.nn import functional as F

import evenstep
from evenstep.errors import ModelError
from exact_floats import same

aten = torch.ops.aten
ONES = torch.ones


def at(*places):
    return torch.tensor(places)


def full(shape, place):
    return torch.full(shape, place)


WINDOW = [2, 2], [2, 2], [0, 0]

REFUSED = {
    # places
    "embedding, places": lambda: aten.embedding_dense_backward(ONES(4, 3), at(1, 0), 5, -1, False),
    "scatter_add, dims of index": lambda: ONES(3, 2).scatter_add(0, at(1, 1), ONES(2)),
    "scatter_add, dims of src": lambda: ONES(6).scatter_add(0, at(1, 1), ONES(2, 2)),
    "scatter_add, floats": lambda: ONES(3).scatter_add(0, ONES(1), ONES(1)),
    "scatter_add, dim": lambda: ONES(3).scatter_add(2, at(1), ONES(1)),
    "index_add, dim": lambda: ONES(3, 2).index_add(4, at(1), ONES(1, 2)),
    "index_add, matrix": lambda: ONES(3).index_add(0, at([1, 0]), ONES(2)),
    "index_add, masks": lambda: ONES(2).index_add(0, at(True, False), ONES(2)),
    "index_put, longer mask": lambda: ONES(1).index_put((at(True, False),), ONES(1), True),
    "index_put, shorter mask": lambda: ONES(3).index_put((at(True, False),), ONES(1), True),
    "index_put, floats": lambda: ONES(3).index_put((at(1.0),), ONES(1), True),
    "put, places": lambda: ONES(3).put(at(0, 1, 2), ONES(1), True),
    "maxima, gradient": lambda: aten.max_pool2d_with_indices_backward(
        ONES(1, 1, 1, 1), ONES(1, 1, 4, 4), *WINDOW, [1, 1], False, full((1, 1, 2, 2), 1)
    ),
    "bags, places": lambda: F.embedding_bag(at(5), ONES(5, 2), at(0)),
    "bags, start": lambda: F.embedding_bag(at(1, 2), ONES(5, 2), at(1, 2)),
    "bags, end": lambda: F.embedding_bag(at(1, 2), ONES(5, 2), at(0, 5)),
    # sizes
    "nll_loss, weights": lambda: F.nll_loss(ONES(2, 3), at(0, 2), ONES(2)),
    "nll_loss of images, weights": lambda: F.nll_loss(
        ONES(2, 3, 4, 4), full((2, 4, 4), 2), ONES(2)
    ),
    "nll_loss, gradient": lambda: aten.nll_loss_backward(
        ONES(1), ONES(2, 3), at(0, 1), None, 0, -100, ONES(())
    ),
    "layer_norm, input": lambda: F.layer_norm(ONES(2, 6), (5,)),
    "layer_norm, weights": lambda: F.layer_norm(ONES(2, 6), (6,), ONES(5)),
    "layer_norm, bias": lambda: F.layer_norm(ONES(2, 6), (6,), ONES(6), ONES(5)),
    "group_norm, weights": lambda: F.group_norm(ONES(2, 6, 3), 2, ONES(5)),
    "group_norm, sizes": lambda: aten.native_group_norm(
        ONES(2, 6, 3), None, None, 2, 6, 9, 2, 1e-5
    ),
    "batch_norm, weights": lambda: F.batch_norm(ONES(2, 6), None, None, ONES(5), None, True),
    "batch_norm, moments": lambda: F.batch_norm(ONES(2, 6), ONES(5), ONES(5)),
    "resizing of nothing": lambda: F.interpolate(ONES(1, 1, 0), size=4, mode="linear"),
    "resizing to nothing": lambda: F.interpolate(ONES(1, 1, 3), size=0, mode="linear"),
    "softmax, gradient": lambda: aten._softmax_backward_data(
        ONES(1, 3), ONES(2, 3), 1, torch.float32
    ),
    "avg_pool2d, gradient": lambda: aten.avg_pool2d_backward(
        ONES(1, 1, 1, 1), ONES(1, 1, 4, 4), *WINDOW, False, True, None
    ),
    "attention, keys": lambda: F.scaled_dot_product_attention(
        ONES(1, 2, 3, 4), ONES(1, 2, 5, 6), ONES(1, 2, 5, 4)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(name):
    errors = (IndexError, RuntimeError, ValueError)
    with pytest.raises(errors):
        REFUSED[name]()
    with evenstep.portable(), pytest.raises(errors) as found:
        REFUSED[name]()
    assert not isinstance(found.value, ModelError)


UNCHECKED_BY_TORCH = {
    "maxima, places": lambda: aten.max_pool2d_with_indices_backward(
        ONES(1, 1, 1, 1), ONES(1, 1, 2, 2), *WINDOW, [1, 1], False, full((1, 1, 1, 1), 4)
    ),
    "attention, values": lambda: F.scaled_dot_product_attention(
        ONES(1, 2, 3, 4), ONES(1, 2, 5, 4), ONES(1, 2, 4, 4)
    ),
    "places": lambda: aten.nll_loss_backward(
        ONES(()), ONES(2, 3), at(0, 3), None, 1, -100, ONES(())
    ),
    "places below 0": lambda: aten.nll_loss_backward(
        ONES(()), ONES(2, 3), at(0, -1), None, 1, -100, ONES(())
    ),
    "batch_norm": lambda: aten.native_batch_norm(
        ONES(2, 6), ONES(2), None, None, None, True, 0.1, 1e-5
    ),
    "layer_norm": lambda: aten.native_layer_norm_backward(
        ONES(2, 6), ONES(2, 6), [6], ONES(1, 1), ONES(1, 1), None, None, [True] * 3
    ),
    "batch_norm, gradient": lambda: aten.native_batch_norm_backward(
        *(ONES(1, 6), ONES(2, 6), None, None, None, ONES(6), ONES(6)), True, 1e-5, [True] * 3
    ),
}


@pytest.mark.parametrize("name", UNCHECKED_BY_TORCH)
def test_what_torch_does_not_check_is_refused(name):
    with evenstep.portable(), pytest.raises((IndexError, RuntimeError)):
        UNCHECKED_BY_TORCH[name]()


def results(x, weight, targets):
    yield from torch.var_mean(x, 0)
    yield torch.std(x)
    yield torch.logsumexp(x, 1)
    yield torch.linalg.vector_norm(x, 2, 0)
    yield torch.cumsum(x, 1)
    for reduction in ("none", "mean"):
        yield from with_gradient(F.cross_entropy(x, targets, reduction=reduction), x)
    yield from with_gradient(F.layer_norm(x, weight.shape), x)
    yield from with_gradient(F.layer_norm(x, weight.shape, weight), x)
    yield from with_gradient(F.batch_norm(x, None, None, training=True), x)
    yield from with_gradient(F.batch_norm(x, weight, weight.exp()), x)
    yield from with_gradient(F.group_norm(x.view(8, 10, 5), 2), x)
    yield from with_gradient(F.conv1d(x[None], x[:, :, None][:4, :8]), x)
    yield from with_gradient(F.interpolate(x[None], size=7, mode="linear"), x)
    yield from with_gradient(F.avg_pool1d(x, 3), x)
    yield from with_gradient(F.embedding(targets, x), x)


def with_gradient(result, x):
    return result, *torch.autograd.grad(result.sum(), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_does_not_matter(dtype):
    """Results of float32 are float32: a narrower array would be written beyond its end."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 50, generator=generator).requires_grad_()
    weight = torch.randn(50, generator=generator)
    targets = torch.arange(8)
    with evenstep.portable():
        expected = list(results(x, weight, targets))
        torch.set_default_dtype(dtype)
        try:
            found = list(results(x, weight, targets))
        finally:
            torch.set_default_dtype(torch.float32)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is torch.float32
        assert same(one, other)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_a_batch_without_examples_is_padded(mode):
    x = torch.empty(0, 3, 3, requires_grad=True)
    with evenstep.portable():
        padded = torch.nn.functional.pad(x, (0, 2), mode)
        (gradient,) = torch.autograd.grad(padded, x, torch.ones_like(padded))
    assert padded.shape == (0, 3, 5)
    assert gradient.shape == x.shape
