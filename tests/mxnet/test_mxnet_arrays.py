"""Arrays: operations are queued, shapes known at once, reads and writes keep their order."""

import threading

import numpy as np
import pytest

from evenstep import mxnet as mx
from evenstep.mxnet import nd
from evenstep.mxnet import np as mnp
from queued import held


def test_the_books_first_lines():
    a = nd.ones((1, 2))
    b = nd.ones((1, 2))
    c = a * b + 2
    assert repr(c) == "\n[[3. 3.]]\n<NDArray 1x2 @cpu(0)>"


def test_an_operation_returns_before_it_has_run():
    event = held(mx.cpu())
    y = nd.dot(nd.ones((2, 3)), nd.ones((3, 4))).sum()
    z = y + 1
    assert z.shape == (1,)
    assert z.dtype == np.float32
    assert not y.chunk.writer.ended
    event.set()
    assert z.asscalar() == 25


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.wait_to_read(),
        lambda x: x.asnumpy(),
        lambda x: x.asscalar(),
        lambda x: float(x),
        lambda x: int(x),
        lambda x: bool(x),
        lambda x: str(x),
        lambda x: f"{x:.1f}",
        lambda x: mx.waitall(),
        lambda x: np.asarray(x),
    ],
)
def test_what_reads_a_value_waits_for_it(read):
    event = held(mx.cpu())
    x = nd.ones((1,)) * 3
    threading.Timer(0.05, event.set).start()
    read(x)
    assert event.is_set()
    assert x.chunk.writer is None


def test_contexts_work_side_by_side():
    event = held(mx.gpu(0))
    slow, fast = nd.ones((2,), ctx=mx.gpu(0)) + 1, nd.ones((2,), ctx=mx.gpu(1)) + 1
    assert fast.asnumpy().tolist() == [2, 2]  # while gpu(0) is busy
    assert not slow.chunk.writer.ended
    event.set()
    assert slow.asnumpy().tolist() == [2, 2]


def test_a_slice_that_is_written_changes_its_array():
    x = nd.zeros((2, 3))
    x[1, :2] = nd.array([5, 6])
    x[0] += 1
    x[:, 2] *= 4
    x[1][0] = 7
    assert x.asnumpy().tolist() == [[1, 1, 4], [7, 6, 0]]


def test_the_books_allreduce():
    data = [nd.ones((1, 2), ctx=mx.gpu(i)) * (i + 1) for i in range(2)]
    data[0][:] += data[1].copyto(data[0].context)
    data[0].copyto(data[1])
    assert [one.asnumpy().tolist() for one in data] == [[[3, 3]], [[3, 3]]]
    assert [str(one.context) for one in data] == ["gpu(0)", "gpu(1)"]


def test_a_write_waits_for_earlier_reads():
    x = nd.ones((3,))
    x.wait_to_read()
    event = held(mx.gpu(0), reads=[x.chunk])
    before = x.copyto(mx.gpu(0))
    x[:] = 5
    y = x + 1
    assert not x.chunk.writer.ended
    event.set()
    assert y.asnumpy().tolist() == [6, 6, 6]
    assert before.asnumpy().tolist() == [1, 1, 1]


def test_a_read_waits_for_earlier_writes():
    x = nd.ones((3,), ctx=mx.gpu(1))
    event = held(mx.gpu(1))
    x[:] = 5
    y = x.copyto(mx.cpu())
    assert not y.chunk.writer.ended
    event.set()
    assert y.asnumpy().tolist() == [5, 5, 5]


def test_a_view_sees_later_writes_and_a_copy_does_not():
    x = nd.arange(6).reshape((2, 3))
    row, copy, turned = x[1], x[1].copy(), x.T
    x += 10
    assert row.asnumpy().tolist() == [13, 14, 15]
    assert copy.asnumpy().tolist() == [3, 4, 5]
    assert turned.asnumpy().tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.flatten(),
        lambda x: x.transpose(),
        lambda x: nd.squeeze(x),
        lambda x: nd.expand_dims(x, 0),
        lambda x: x.astype("float32"),
        lambda x: nd.stop_gradient(x),
        lambda x: nd.identity(x),
        lambda x: x.copyto(mx.cpu()),
        lambda x: nd.slice_axis(x, axis=0, begin=0, end=1),
        lambda x: nd.broadcast_to(x, (2, 2)),
    ],
)
def test_a_result_has_memory_of_its_own(make):
    x = nd.ones((2, 2))
    y = make(x)
    x[:] = 9
    assert set(y.asnumpy().flatten()) == {1}


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda x: 2 - x, [2, 1, 0]),
        (lambda x: 2 / (x + 1), [2, 1, 2 / 3]),
        (lambda x: 2**x, [1, 2, 4]),
        (lambda x: -x, [0, -1, -2]),
        (lambda x: x > 1, [0, 0, 1]),
        (lambda x: x == 1, [0, 1, 0]),
        (lambda x: nd.maximum(x, 1), [1, 1, 2]),
        (lambda x: x.clip(0.5, 1.5), [0.5, 1, 1.5]),
        (lambda x: nd.concat(x, x, dim=0), [0, 1, 2, 0, 1, 2]),
        (lambda x: nd.stack(x, x)[0], [0, 1, 2]),
        (lambda x: nd.one_hot(x, 3)[1], [0, 1, 0]),
        (lambda x: nd.pick(nd.stack(x, x), nd.array([0, 9])), [0, 2]),
        (lambda x: nd.take(x, nd.array([2, 0])), [2, 0]),
        (lambda x: x.sum(), [3]),
        (lambda x: x.mean(), [1]),
        (lambda x: x.max(), [2]),
        (lambda x: x.argmax(axis=0), [2]),
        (lambda x: (x * x).norm(), [17**0.5]),
        (lambda x: nd.dot(x, x), [5]),
        (lambda x: nd.where(x > 1, x, x + 7), [7, 8, 2]),
        (lambda x: nd.sum(nd.stack(x, x), axis=0, exclude=True), [3, 3]),
        (lambda x: nd.split(x, 3, axis=0)[2], [2]),
        (lambda x: x.expand_dims(axis=0).reshape(-1), [0, 1, 2]),
    ],
)
def test_functions_of_nd(compute, expected):
    found = compute(nd.arange(3))
    assert found.dtype == np.float32
    assert isinstance(found, nd.NDArray)
    values = found.asnumpy()
    assert values.shape == found.shape
    np.testing.assert_allclose(values, np.asarray(expected, dtype=np.float32), rtol=1e-6)


def test_random_numbers_depend_on_the_context_s_own_order():
    mx.random.seed(3)
    one = [nd.random.normal(shape=(4,), ctx=mx.gpu(i)).asnumpy() for i in (0, 1)]
    mx.random.seed(3)
    other = [nd.random.normal(shape=(4,), ctx=mx.gpu(i)).asnumpy() for i in (1, 0)]
    assert (one[0] == other[1]).all()
    assert (one[1] == other[0]).all()
    uniform = mnp.random.uniform(2, 3, size=(100,)).asnumpy()
    assert 2 <= uniform.min() < uniform.max() < 3
    assert set(nd.random.randint(0, 3, shape=(50,)).asnumpy()) == {0, 1, 2}
