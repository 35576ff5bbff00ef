"""Hybridized blocks: recorded once, run as one task, and exported; symbols that can be printed."""

import json

import numpy as np
import pytest
import torch

import evenstep
from evenstep import mxnet as mx
from evenstep.mxnet import autograd, gluon, init, nd
from evenstep.mxnet.gluon import loss as gloss
from evenstep.mxnet.gluon import nn


def mlp(**options):
    net = nn.HybridSequential(**options)
    net.add(nn.Dense(16, activation="relu"), nn.Dropout(0.5), nn.BatchNorm(), nn.Dense(2))
    net.initialize(init.Normal(0.5))
    return net


class Printing(nn.HybridBlock):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = nn.Dense(10)
        self.output = nn.Dense(2)

    def hybrid_forward(self, F, x):
        print("F: ", F)
        print("x: ", x)
        x = F.relu(self.hidden(x))
        print("hidden: ", x)
        return self.output(x)


def tasks_of(call):
    """Return how many tasks a call queues."""
    from evenstep.mxnet.core.runtime import runtime

    mx.waitall()
    before = len(runtime()._engine.trace.spans)
    call()
    mx.waitall()
    return len(runtime()._engine.trace.spans) - before


def test_a_hybridized_call_is_one_task_with_the_same_bits():
    net, x = mlp(), nd.random.normal(shape=(3, 8))
    expected = net(x).asnumpy()
    several = tasks_of(lambda: net(x))
    net.hybridize()
    assert (net(x).asnumpy() == expected).all()
    assert tasks_of(lambda: net(x)) == 1 < several
    net.hybridize(False)
    assert tasks_of(lambda: net(x)) == several


def test_prints_happen_while_it_is_recorded_only(capsys):
    net, x = Printing(), nd.random.normal(shape=(1, 4))
    net.initialize()
    expected = net(x).asnumpy()
    shown = capsys.readouterr().out
    assert "F:  <module 'evenstep.mxnet.nd'" in shown
    assert "<NDArray 1x4 @cpu(0)>" in shown
    net(x)
    assert "hidden:" in capsys.readouterr().out
    net.hybridize()
    assert (net(x).asnumpy() == expected).all()
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("F:  <module 'evenstep.mxnet.sym'")
    assert shown[1:] == ["x:  <Symbol data>", f"hidden:  <Symbol {net.name}_relu0>"]
    assert (net(x).asnumpy() == expected).all()
    assert capsys.readouterr().out == ""


def test_the_modes_of_training_reach_a_recorded_program():
    net, x = mlp(), nd.random.normal(shape=(64, 8))
    net.hybridize()
    net(x)
    mean = net[2].running_mean
    before = mean.data().asnumpy()
    with autograd.record():
        one = net(x).asnumpy()
    assert not (mean.data().asnumpy() == before).all()
    with autograd.record():
        other = net(x).asnumpy()
    assert not (one == other).all()  # dropout drew again
    assert (net(x).asnumpy() == net(x).asnumpy()).all()


def train(hybrid):
    mx.random.seed(0)
    net = nn.HybridSequential()
    net.add(nn.Dense(16, activation="relu"), nn.BatchNorm(), nn.Dropout(0.2), nn.Dense(2))
    net.initialize(init.Normal(0.5))
    net(nd.ones((1, 5)))  # draws the weights before dropout draws from the same generator
    if hybrid:
        net.hybridize(static_alloc=True, static_shape=True)
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.05})
    rng = np.random.default_rng(0)
    for _ in range(5):
        X, y = nd.array(rng.normal(size=(8, 5))), nd.array(rng.integers(0, 2, 8))
        with autograd.record():
            found = gloss.SoftmaxCrossEntropyLoss()(net(X.astype("float32")), y)
        found.backward()
        trainer.step(8)
    return [one.data().asnumpy() for one in net.collect_params().values()]


def test_a_hybridized_training_has_the_same_bits():
    for one, other in zip(train(False), train(True), strict=True):
        assert (one == other).all()


def test_other_shapes_are_recorded_again():
    net = mlp()
    net.hybridize()
    assert net(nd.ones((3, 8))).shape == (3, 2)
    assert net(nd.ones((5, 8))).shape == (5, 2)
    with pytest.raises(mx.MXNetError, match=r"FullyConnected of arrays of shapes \(5, 9\)"):
        net(nd.ones((5, 9)))


def test_new_values_of_parameters_are_used():
    net, x = mlp(), nd.ones((3, 8))
    net.hybridize()
    net(x)
    net[3].weight.set_data(nd.zeros((2, 16)))
    net[3].bias.set_data(nd.array([1, 2]))
    assert (net(x).asnumpy() == [1, 2]).all()


def test_several_inputs_and_outputs():
    class Two(nn.HybridBlock):
        def __init__(self):
            super().__init__()
            self.dense = nn.Dense(3)

        def forward(self, x, y):
            parts = nd.split(self.dense(x) + y, 3, axis=1)
            return parts[0], [parts[2] * 2, y.sum()]

    net = Two()
    net.initialize()
    x, y = nd.ones((2, 4)), nd.ones((2, 3))
    expected = net(x, y)
    net.hybridize()
    found = net(x, y)
    assert isinstance(found, tuple)
    assert isinstance(found[1], list)
    for one, other in zip([expected[0], *expected[1]], [found[0], *found[1]], strict=True):
        assert one.shape == other.shape
        assert (one.asnumpy() == other.asnumpy()).all()


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda F, x: x.asnumpy(), r"<Symbol data> has no asnumpy: a hybridized block is recorded"),
        (lambda F, x: F.relu(x) if x.sum() > 0 else x, "may not branch on values"),
        (lambda F, x: x + nd.ones((1,)), r"got an array of shape \(1,\) beside symbols"),
        (lambda F, x: x.__iadd__(1), r"\+= changes a symbol in place"),
        (lambda F, x: x.__setitem__(0, 1), r"changes a symbol in place"),
    ],
)
def test_what_a_program_can_t_hold_is_refused(compute, message):
    net = nn.HybridLambda(compute)
    net.hybridize()
    with pytest.raises(mx.MXNetError, match=message):
        net(nd.ones((2, 3)))


def test_export_writes_a_program_that_runs_without_its_code(tmp_path):
    net, x = mlp(), nd.random.normal(shape=(1, 8))
    with pytest.raises(mx.MXNetError, match=r"call hybridize\(\) and net\(x\) first"):
        net.export(str(tmp_path / "my_mlp"))
    net.hybridize()
    expected = net(x).asnumpy()
    files = net.export(str(tmp_path / "my_mlp"))
    assert [one.removeprefix(str(tmp_path)) for one in files] == [
        "/my_mlp-symbol.json",
        "/my_mlp-0000.params",
    ]
    text = json.loads((tmp_path / "my_mlp-symbol.json").read_text())
    assert text["program"] == "my_mlp.pt2"
    program = evenstep.load_exported(tmp_path / "my_mlp.pt2")
    np.testing.assert_allclose(
        program(torch.from_numpy(x.asnumpy())).numpy(), expected, rtol=1e-5, atol=1e-6
    )
    assert program(torch.ones(5, 8)).shape == (5, 2)
    values = nd.load(files[1])
    assert set(values) == set(net.collect_params())
    again = gluon.SymbolBlock.imports(files[0], ["data"], files[1], ctx=mx.cpu())
    np.testing.assert_allclose(again(x).asnumpy(), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(mx.MXNetError, match=r"is not a file that HybridBlock.export"):
        gluon.SymbolBlock.imports(files[1], ["data"])
