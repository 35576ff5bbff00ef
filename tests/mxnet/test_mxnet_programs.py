"""Whole programs with the book's calls: several contexts from scratch, and the end of a program."""

import textwrap

import numpy as np
import pytest

from evenstep import mxnet as mx
from evenstep.mxnet import autograd, gluon, nd
from evenstep.mxnet.gluon import utils as gutils
from warm import run

LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def lenet(X, params):
    h1_conv = nd.Convolution(data=X, weight=params[0], bias=params[1], kernel=(3, 3), num_filter=4)
    h1 = nd.Pooling(data=nd.relu(h1_conv), pool_type="avg", kernel=(2, 2), stride=(2, 2))
    h2_linear = nd.dot(nd.flatten(h1), params[2]) + params[3]
    return nd.dot(nd.relu(h2_linear), params[4]) + params[5]


def allreduce(data):
    for i in range(1, len(data)):
        data[0][:] += data[i].copyto(data[0].context)
    for i in range(1, len(data)):
        data[0].copyto(data[i])


def train(ctx, parts, steps=4):
    """Train from scratch; a context with several parts adds their gradients."""
    mx.random.seed(1)
    shapes = [(4, 1, 3, 3), (4,), (4 * 9, 8), (8,), (8, 3), (3,)]
    made = [nd.random.normal(scale=0.3, shape=shape) for shape in shapes]
    params = [[one.copyto(c) for one in made] for c in ctx]
    for one in (one for own in params for one in own):
        one.attach_grad("add")
    X = nd.random.uniform(shape=(8, 1, 8, 8))
    y = nd.random.randint(0, 3, shape=(8,))
    places = [i * len(ctx) // parts for i in range(parts)]
    for _ in range(steps):
        Xs = gutils.split_and_load(X, [ctx[i] for i in places])
        ys = gutils.split_and_load(y, [ctx[i] for i in places])
        for part, label, i in zip(Xs, ys, places, strict=True):
            with autograd.record():
                found = LOSS(lenet(part, params[i]), label)
            found.backward()
        for i in range(len(made)):
            allreduce([own[i].grad for own in params])
        for one in (one for own in params for one in own):
            one[:] = one - 0.2 * one.grad / X.shape[0]
            one.zero_grad()
    return [[one.asnumpy() for one in own] for own in params]


def test_a_training_from_scratch_has_the_same_bits_on_one_context_and_on_two():
    (one,) = train([mx.gpu(0)], 2)
    two, three = train([mx.gpu(0), mx.gpu(1)], 2)
    for a, b, c in zip(one, two, three, strict=True):
        assert (a == b).all()
        assert (b == c).all()
    (other,) = train([mx.gpu(0)], 1)
    assert not all((a == b).all() for a, b in zip(one, other, strict=True))


def test_copies_beside_products():
    """Section 8.3.2: y[i] is copied while y[i + 1] is computed."""
    x = nd.random.uniform(shape=(50, 50), ctx=mx.gpu(0))
    expected = x.asnumpy() @ x.asnumpy()
    copies = [y.copyto(mx.cpu()) for y in [nd.dot(x, x) for _ in range(10)]]
    nd.waitall()
    for one in copies:
        assert one.context == mx.cpu()
        np.testing.assert_allclose(one.asnumpy(), expected, rtol=1e-5)


def ended(program):
    return run("-c", textwrap.dedent(program))


@pytest.mark.parametrize("ends", ["", "raise SystemExit(0)"])
def test_the_end_of_a_program_finishes_what_is_queued(ends):
    found = ended(f"""
        from evenstep.mxnet import nd, operation

        def shown(data):
            if not data.is_meta:
                print("ran", flush=True)
            return data + 1

        x = nd.ones((300, 300))
        for _ in range(5):
            x = nd.dot(x, x) / 300
        operation(shown)(x)
        {ends}
    """)
    assert (found.returncode, found.stdout, found.stderr) == (0, "ran\n", "")


def test_an_error_that_nobody_has_seen_is_shown_at_the_end():
    found = ended("""
        from evenstep.mxnet import nd
        nd.Embedding(nd.array([5]), nd.ones((3, 2)))
    """)
    assert (
        "MXNetError: nd.Embedding, queued at <string>:3, failed: index out of range" in found.stderr
    )
