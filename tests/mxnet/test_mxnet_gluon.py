"""Gluon: blocks and their parameters, losses, data, saving, and the trainer on several contexts."""

import random
import time

import numpy as np
import pytest
import torch

from evenstep import mxnet as mx
from evenstep.errors import DeferredInitializationError
from evenstep.mxnet import autograd, d2l, gluon, init, metric, nd
from evenstep.mxnet.core.invoke import run
from evenstep.mxnet.gluon import loss as gloss
from evenstep.mxnet.gluon import nn
from evenstep.mxnet.gluon import utils as gutils


def mlp(*contexts, sigma=0.1):
    net = nn.Sequential()
    net.add(nn.Dense(16, activation="relu"), nn.Dense(4))
    net.initialize(init.Normal(sigma), ctx=list(contexts) or None)
    return net


def values_of(net, context=None):
    return [one.data(context).asnumpy() for one in net.collect_params().values()]


def same(one, other):
    return all((a == b).all() for a, b in zip(one, other, strict=True))


# ---- parameters


def test_shapes_are_found_in_the_first_call():
    net = mlp()
    weight = net[0].weight
    assert weight.shape == (16, 0)
    with pytest.raises(
        DeferredInitializationError, match=r"the shape \(16, 0\) of dense\d+_weight"
    ):
        weight.data()
    assert net(nd.ones((3, 2, 4))).shape == (3, 4)
    assert weight.shape == (16, 8)
    assert weight.data().shape == (16, 8)


def test_parameters_are_equal_on_all_contexts_and_not_elsewhere():
    contexts = [mx.gpu(0), mx.gpu(1)]
    net = mlp(*contexts)
    parts = gutils.split_and_load(nd.random.uniform(shape=(4, 8)), contexts)
    outputs = [net(part) for part in parts]
    assert [one.context for one in outputs] == contexts
    assert same(values_of(net, contexts[0]), values_of(net, contexts[1]))
    weight = net[0].params.get("weight")
    with pytest.raises(
        RuntimeError, match=r"not initialized on cpu\(0\), only on gpu\(0\), gpu\(1\)"
    ):
        weight.data()
    assert weight.list_ctx() == contexts
    assert len(weight.list_data()) == len(weight.list_grad()) == 2


def test_a_parameter_of_a_block_of_one_s_own():
    class Scaled(nn.HybridBlock):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.scale = self.params.get("scale", shape=(1,), init="ones")
            self.dense = nn.Dense(3)

        def hybrid_forward(self, F, x, scale):
            return F.broadcast_mul(self.dense(x), scale)

    net = Scaled(prefix="mine_")
    net.initialize()
    x = nd.ones((2, 4))
    expected = net(x).asnumpy()
    net.scale.set_data(nd.array([2]))
    assert "mine_scale" in net.collect_params()
    assert (net(x).asnumpy() == 2 * expected).all()


def test_saved_parameters_are_loaded(tmp_path):
    file = str(tmp_path / "net.params")
    net, other = mlp(), mlp()
    x = nd.random.uniform(shape=(2, 8))
    expected = net(x).asnumpy()
    net.save_parameters(file)
    other.load_parameters(file, ctx=mx.gpu(1))
    assert (other(x.copyto(mx.gpu(1))).asnumpy() == expected).all()
    with pytest.raises(mx.MXNetError, match="has no values for .*weight.*build the same network"):
        nn.Dense(2).load_parameters(file)


# ---- layers


def test_layers_compute_what_torch_does():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    net = nn.Sequential()
    net.add(
        nn.Conv2D(4, kernel_size=3, strides=2, padding=1, activation="relu"),
        nn.MaxPool2D(2),
        nn.Conv2D(6, kernel_size=1, use_bias=False),
        nn.AvgPool2D(2, strides=1),
        nn.Flatten(),
        nn.Dense(5, activation="tanh"),
    )
    net.initialize(init.Normal(0.5))
    found = net(nd.array(x)).asnumpy()
    w = [torch.from_numpy(one) for one in values_of(net)]
    F = torch.nn.functional
    expected = F.max_pool2d(F.relu(F.conv2d(x, w[0], w[1], stride=2, padding=1)), 2)
    expected = F.avg_pool2d(F.conv2d(expected, w[2]), 2, 1).flatten(1)
    assert (found == torch.tanh(F.linear(expected, w[3], w[4])).numpy()).all()


def test_batch_norm_learns_statistics_while_training_only():
    layer = nn.BatchNorm()
    layer.initialize()
    x = nd.random.normal(3, 2, shape=(64, 5, 4, 4))
    np.testing.assert_allclose(layer(x).asnumpy(), x.asnumpy(), rtol=1e-4)
    with autograd.record():
        y = layer(x)
    assert abs(y.asnumpy().mean()) < 1e-3
    values = x.asnumpy()
    np.testing.assert_allclose(
        layer.running_mean.data().asnumpy(), 0.1 * values.mean((0, 2, 3)), rtol=1e-4
    )
    np.testing.assert_allclose(
        layer.running_var.data().asnumpy(), 0.9 + 0.1 * values.var((0, 2, 3)), rtol=1e-4
    )


# ---- losses and metrics


def test_losses_compute_what_torch_does():
    scores, labels = torch.randn(6, 4), torch.randint(0, 4, (6,))
    F = torch.nn.functional
    x, y = nd.array(scores), nd.array(labels)
    pairs = [
        (gloss.SoftmaxCrossEntropyLoss()(x, y), F.cross_entropy(scores, labels, reduction="none")),
        (
            gloss.SoftmaxCrossEntropyLoss(sparse_label=False)(x, nd.softmax(x)),
            F.cross_entropy(scores, scores.softmax(1), reduction="none"),
        ),
        (gloss.L2Loss()(x, x * 0), (scores**2 / 2).mean(1)),
        (gloss.L1Loss()(x, x * 0), scores.abs().mean(1)),
        (gloss.HuberLoss()(x, x * 0), F.huber_loss(scores, scores * 0, reduction="none").mean(1)),
        (
            gloss.SigmoidBCELoss()(x, x > 0),
            F.binary_cross_entropy_with_logits(scores, (scores > 0).float(), reduction="none").mean(
                1
            ),
        ),
        (gloss.L2Loss(weight=3)(x, x * 0, nd.ones((6, 1)) * 2), 3 * (scores**2).mean(1)),
    ]
    for found, expected in pairs:
        assert found.shape == (6,)
        np.testing.assert_allclose(found.asnumpy(), expected.numpy(), rtol=1e-5, atol=1e-6)


def test_a_label_out_of_range_is_an_error():
    found = gloss.SoftmaxCrossEntropyLoss()(nd.ones((2, 3)), nd.array([0, 3]))
    with pytest.raises(mx.MXNetError, match=r"SoftmaxCrossEntropyLoss, queued at .* out of bounds"):
        found.asnumpy()


def test_metrics():
    scores, labels = nd.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]]), nd.array([0, 1, 1])
    found = metric.create(["acc", "ce", "mse"])
    found.metrics[2:] = [metric.Loss()]
    found.update([labels], [scores])
    named = dict(found.get_name_value())
    assert named["accuracy"] == pytest.approx(2 / 3)
    assert named["cross-entropy"] == pytest.approx(-np.log([0.9, 0.8, 0.3]).mean(), rel=1e-6)
    error = metric.RMSE()
    error.update(nd.array([1, 2]), nd.array([1, 4]))
    assert error.get() == ("rmse", pytest.approx(2**0.5))
    with pytest.raises(mx.MXNetError, match="got metric 'f2': use one of acc"):
        metric.create("f2")


# ---- data


def test_a_loader_gives_each_example_once_in_an_order_of_seed_and_epoch():
    features, labels = nd.arange(20).reshape((10, 2)), nd.arange(10)

    def epochs():
        loader = gluon.data.DataLoader(gluon.data.ArrayDataset(features, labels), 4, shuffle=True)
        assert len(loader) == 3
        return [[y.asnumpy().tolist() for _, y in loader] for _ in range(2)]

    first, second = epochs()
    assert [len(one) for one in first] == [4, 4, 2]
    assert sorted(i for one in first for i in one) == list(range(10))
    assert sorted(i for one in second for i in one) == list(range(10))
    assert first != second
    assert epochs() == [first, second]
    for X, y in gluon.data.DataLoader(gluon.data.ArrayDataset(features, labels), 5):
        assert (X.asnumpy()[:, 0] == 2 * y.asnumpy()).all()


def test_fashion_mnist(fashion_mnist_dir):
    data = gluon.data.vision.FashionMNIST(fashion_mnist_dir, train=False)
    image, _ = data[0]
    assert image.shape == (28, 28, 1)
    assert image.dtype == np.uint8
    whole = gluon.data.DataLoader(
        data.transform_first(gluon.data.vision.transforms.ToTensor()), 256, num_workers=4
    )
    X, y = next(iter(whole))
    assert X.shape == (256, 1, 28, 28)
    assert X.dtype == np.float32
    assert y.dtype == np.int32
    one_by_one = data.transform_first(lambda one: gluon.data.vision.transforms.ToTensor()(one))
    assert (one_by_one[0][0].asnumpy() == X.asnumpy()[0]).all()
    books, _ = d2l.load_data_fashion_mnist(256, root=fashion_mnist_dir)
    X, y = next(iter(books))
    assert (X.shape, y.shape) == ((256, 1, 28, 28), (256,))


# ---- training


def batches(steps, size=8):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        yield (
            nd.array(rng.normal(size=(size, 8)).astype(np.float32)),
            nd.array(rng.integers(0, 4, size)),
        )


def train(contexts, parts, *, steps=5, optimizer="sgd", options=None, net=None, held=None):
    """Train with every batch in `parts` equal parts, dealt to the contexts in order."""
    mx.random.seed(0)
    net = net or mlp(*contexts)
    if len(contexts) < parts:
        net.collect_params().setattr("grad_req", "add")
    trainer = gluon.Trainer(
        net.collect_params(), optimizer, options or {"learning_rate": 0.5, "momentum": 0.9}
    )
    loss = gloss.SoftmaxCrossEntropyLoss()
    places = [contexts[i * len(contexts) // parts] for i in range(parts)]
    for X, y in batches(steps):
        Xs, ys = gutils.split_and_load(X, places), gutils.split_and_load(y, places)
        for number, (part, label) in enumerate(zip(Xs, ys, strict=True)):
            with autograd.record():
                found = loss(net(part), label)
            if held is not None:
                held(number)
            found.backward()
        trainer.step(X.shape[0])
        if len(contexts) < parts:
            net.zero_grad()
    return values_of(net, contexts[0])


def test_two_contexts_give_the_same_bits_as_one_with_the_same_parts():
    one = train([mx.gpu(0)], 2)
    two = train([mx.gpu(0), mx.gpu(1)], 2)
    assert same(one, two)
    assert not same(one, train([mx.gpu(0)], 1))  # another split: other bits


def test_the_bits_do_not_depend_on_which_context_is_slow():
    draw = random.Random(0)

    def hold(number):
        pause = draw.random() / 100
        run("slow", mx.gpu(number), lambda: time.sleep(pause))

    plain = train([mx.gpu(0), mx.gpu(1)], 2)
    assert same(plain, train([mx.gpu(0), mx.gpu(1)], 2, held=hold))


def test_four_contexts_sum_in_the_canonical_order():
    contexts = [mx.gpu(i) for i in range(4)]
    parameter = gluon.Parameter("w", shape=(3,))
    parameter.initialize(init.Zero(), ctx=contexts)
    values = np.float32([[1e8, 1, 3], [1, 1e8, 3], [-1e8, 1, 3], [1, -1e8, 3]])
    for context, value in zip(contexts, values, strict=True):
        with autograd.record():
            y = parameter.data(context) * nd.array(value, ctx=context)
        y.backward()
    trainer = gluon.Trainer([parameter], "sgd", {"learning_rate": 1})
    trainer.allreduce_grads()
    expected = (values[0] + values[1]) + (values[2] + values[3])
    for context in contexts:
        assert (parameter.grad(context).asnumpy() == expected).all()
    trainer.update(2)
    assert (parameter.data(contexts[3]).asnumpy() == -expected / 2).all()


@pytest.mark.parametrize(
    ("name", "options", "reference"),
    [
        ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01},
         lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01)),
        ("adam", {"learning_rate": 0.01, "beta1": 0.8},
         lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.999))),
        ("rmsprop", {"learning_rate": 0.01, "gamma1": 0.9},
         lambda p: torch.optim.RMSprop(p, 0.01, alpha=0.9)),
        ("adagrad", {"learning_rate": 0.1}, lambda p: torch.optim.Adagrad(p, 0.1)),
    ],
)  # fmt: skip
def test_optimizers_compute_what_torch_does(name, options, reference):
    found = train([mx.cpu()], 1, optimizer=name, options=options)
    mx.random.seed(0)
    net = mlp(mx.cpu())
    net(nd.ones((1, 8)))
    w = [torch.from_numpy(one).requires_grad_() for one in values_of(net)]
    optimizer = reference(w)
    F = torch.nn.functional
    for X, y in batches(5):
        scores = F.linear(F.relu(F.linear(torch.from_numpy(X.asnumpy()), w[0], w[1])), w[2], w[3])
        total = F.cross_entropy(scores, torch.from_numpy(y.asnumpy()).long(), reduction="sum")
        optimizer.zero_grad()
        (total / 8).backward()
        optimizer.step()
    for one, other in zip(found, w, strict=True):
        np.testing.assert_allclose(one, other.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_uneven_batches():
    with pytest.raises(mx.MXNetError, match="got 5 examples for 2 contexts: use a batch size"):
        gutils.split_and_load(nd.ones((5, 2)), [mx.gpu(0), mx.gpu(1)])
    parts = gutils.split_and_load(nd.ones((5, 2)), [mx.gpu(0), mx.gpu(1)], even_split=False)
    assert [len(one) for one in parts] == [2, 3]


def test_the_books_helpers(fashion_mnist_dir, capsys):
    contexts = d2l.try_all_gpus()[:2]
    assert len(contexts) == 2
    net = mlp(*contexts)
    _, test_iter = d2l.load_data_fashion_mnist(2500, root=fashion_mnist_dir)
    several = d2l.evaluate_accuracy_gpus(net, test_iter)
    one = d2l.evaluate_accuracy(test_iter, net, contexts[0])
    assert several == one == d2l.evaluate_accuracy_gpu(net, test_iter)
    assert 0 < one < 1
    with d2l.Benchmark("Work"):
        pass
    assert capsys.readouterr().out.startswith("Work: 0.0")
    w = nd.ones((2,))
    w.attach_grad()
    with autograd.record():
        y = w * 4
    y.backward()
    d2l.sgd([w], 0.5, 2)
    assert w.asnumpy().tolist() == [0, 0]
    assert d2l.accuracy(nd.array([[0, 1], [1, 0]]), nd.array([1, 1])) == 1
    gradients = [nd.ones((2,)) * 3, nd.ones((2,)) * 4]
    assert gutils.clip_global_norm(gradients, 1) == pytest.approx(50**0.5)
    assert float((gradients[0] ** 2).sum() + (gradients[1] ** 2).sum()) == pytest.approx(
        1, rel=1e-5
    )
