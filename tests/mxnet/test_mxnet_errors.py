"""Errors: at once where they can be seen, otherwise where a value is waited for, with the line."""

import sys

import pytest

from evenstep import mxnet as mx
from evenstep.errors import DeviceError
from evenstep.mxnet import autograd, nd, sym
from evenstep.mxnet import np as mnp
from evenstep.mxnet.core import context as contexts


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (lambda: nd.ones((2, 3)) + nd.ones((2, 2)), r"nd.add of .* \(2, 3\) and \(2, 2\)"),
        (lambda: nd.dot(nd.ones((2, 3)), nd.ones((2, 3))), r"nd.dot of arrays of shapes \(2, 3\)"),
        (lambda: nd.ones((2, 3)).reshape((4, 2)), r"reshape of an array of shape \(2, 3\)"),
        (lambda: nd.concat(nd.ones((2, 3)), nd.ones((3, 2))), r"nd.concat of arrays"),
        (lambda: nd.Activation(nd.ones((2,)), act_type="rulu"), r"'rulu': use one of relu"),
        (lambda: nd.ones((2,)).__setitem__(slice(0, 1), nd.ones((3,))), r"shape \(3,\) for"),
        (lambda: nd.ones((2,)).__iadd__(nd.ones((3,))), r"\+= of .* \(2,\) and \(3,\)"),
        (lambda: nd.ones((2,)).copyto(nd.ones((3,))), r"shape \(3,\) to copy \(2,\)"),
        (lambda: nd.ones((2,)).asscalar(), r"got an array of shape \(2,\): only one element"),
        (lambda: nd.exp([1, 2]), r"nd.exp got no array among list: make arrays with nd.array"),
        (lambda: nd.ones((2,)) + nd.ones((2,), ctx=mx.gpu(0)), r"and in gpu\(0\): copy"),
        (lambda: nd.ones((2,)).astype("complex64"), r"got dtype complex64: use one of"),
        (lambda: nd.ones((2,)).attach_grad("sum"), r"got grad_req='sum': use 'write', 'add' or"),
        (lambda: nd.load("/nowhere"), r"/nowhere can't be read"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_at_once(compute, message):
    with pytest.raises(mx.MXNetError, match=message):
        compute()
    mx.waitall()  # nothing was queued that fails


def test_a_queued_error_appears_where_its_value_is_waited_for_with_the_line():
    vectors = nd.ones((3, 2))
    found = nd.Embedding(nd.array([5]), vectors)  # THIS LINE
    total = found.sum() + 1
    good = vectors + 1
    assert good.asnumpy().tolist() == [[2, 2]] * 3
    with pytest.raises(
        mx.MXNetError, match=r"nd.Embedding, queued at .*test_mxnet_errors.py:\d+ "
    ) as info:
        total.asnumpy()
    assert "# THIS LINE" in str(info.value)
    assert "out of range" in str(info.value)
    assert isinstance(info.value, RuntimeError)
    last = str(info.traceback[-1].path)
    hides = sys.version_info >= (3, 11)  # a bare `raise` of 3.10 puts evenstep's frames back
    assert not hides or "test_mxnet_errors.py" in last or "torch" in last
    mx.waitall()  # it was raised already


def test_waitall_raises_what_nobody_has_seen():
    nd.Embedding(nd.array([5]), nd.ones((3, 2)))
    with pytest.raises(mx.MXNetError, match="nd.Embedding, queued at"):
        mx.waitall()
    mx.waitall()


def test_an_error_in_a_backward_pass_appears_at_the_gradient():
    x = nd.ones((2,))
    x.attach_grad()
    with autograd.record():
        y = (x * x).exp()
    y[:] = 0  # torch needs the result for the gradient
    y.backward()
    with pytest.raises(mx.MXNetError, match=r"backward, queued at .*modified by an inplace"):
        x.grad.asnumpy()


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        (nd, "convolution", r"evenstep.mxnet.nd has no 'convolution': close to it: .*Convolution"),
        (nd, "Custom", r"has no 'Custom'.*`dir\(nd\)` lists all \d+ names"),
        (mnp, "concatenat", r"evenstep.mxnet.np has no 'concatenat': close to it: concatenate"),
        (
            mx.npx,
            "batch_norms",
            r"evenstep.mxnet.npx has no 'batch_norms': close to it: batch_norm",
        ),
        (sym, "bogus", r"evenstep.mxnet.nd has no 'bogus'"),
    ],
)
def test_an_operation_that_is_not_there_is_named(module, name, message):
    with pytest.raises(AttributeError, match=message):
        getattr(module, name)
    assert not hasattr(module, name)


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(contexts, "gpu_count", lambda: 2)
    with pytest.raises(
        DeviceError, match=r"got gpu\(5\), but this machine has gpu\(0\) to gpu\(1\)"
    ):
        nd.ones((2,), ctx=mx.gpu(5))
    assert mx.num_gpus() == 2


def test_without_gpus_a_note_is_given_once(caplog):
    if mx.num_gpus():
        pytest.skip("this machine has GPUs")
    caplog.set_level("WARNING", logger="evenstep")
    nd.ones((2,), ctx=mx.gpu(0))
    nd.ones((2,), ctx=mx.gpu(1)).wait_to_read()
    notes = [one.message for one in caplog.records if "torch sees no GPU" in one.message]
    assert len(notes) == 1
