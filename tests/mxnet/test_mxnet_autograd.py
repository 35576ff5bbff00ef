"""Automatic differentiation: recorded operations, gradients, and their order with writes."""

import gc
import threading
import weakref

import pytest

from evenstep import mxnet as mx
from evenstep.mxnet import autograd, nd
from evenstep.mxnet.core import tape
from queued import held


def leaf(*values, grad_req="write", ctx=None):
    x = nd.array(list(values), ctx=ctx)
    x.attach_grad(grad_req)
    return x


def the_books_first(x):
    column = x.reshape((4, 1))
    return 2 * nd.dot(column.T, column)


@pytest.mark.parametrize(
    ("values", "function", "expected"),
    [
        ((0, 1, 2, 3), the_books_first, [0, 4, 8, 12]),
        ((1, 2, 3), lambda x: (x[1:] * x[:2]).sum() + x[0] + x.reshape((3, 1))[2], [3, 4, 3]),
        ((1, 2), lambda x: x.as_in_context(mx.gpu(0)) * 3, [3, 3]),
    ],
)
def test_what_is_recorded_is_differentiated(values, function, expected):
    x = leaf(*values)
    assert not x.grad.asnumpy().any()
    with autograd.record():
        y = function(x)
    y.backward()
    assert x.grad.asnumpy().tolist() == expected
    assert x.grad.context == mx.cpu()


def test_backward_returns_before_it_has_run():
    x = leaf(1, 2)
    event = held(mx.cpu())
    with autograd.record():
        y = (x * x).sum()
    y.backward()
    gradient = x.grad
    assert not gradient.chunk.writer.ended
    event.set()
    assert gradient.asnumpy().tolist() == [2, 4]


@pytest.mark.parametrize(("grad_req", "expected"), [("write", [2, 4]), ("add", [4, 8])])
def test_a_gradient_is_written_or_added(grad_req, expected):
    x = leaf(1, 2, grad_req=grad_req)
    for _ in range(2):
        with autograd.record():
            y = x * x
        y.backward()
    assert x.grad.asnumpy().tolist() == expected
    x.zero_grad()
    assert x.grad.asnumpy().tolist() == [0, 0]


def test_the_gradient_is_the_same_array_after_each_pass():
    x = leaf(1, 2)
    gradient = x.grad
    for factor in (1, 3):
        with autograd.record():
            y = x * factor
        y.backward()
        assert x.grad is gradient
        assert gradient.asnumpy().tolist() == [factor, factor]


def test_gradients_of_one_sum_share_no_memory():
    """Torch gives the same tensor for both."""
    x, y = leaf(1, 2), leaf(3, 4)
    with autograd.record():
        z = x + y
    z.backward()
    x.grad[:] = 9
    assert y.grad.asnumpy().tolist() == [1, 1]


def test_an_update_in_place_comes_after_the_backward_pass():
    x = leaf(1, 2)
    event = held(mx.cpu())
    with autograd.record():
        y = x * x
    y.backward()
    x -= 0.5 * x.grad
    x[:] = x - 1
    event.set()
    assert x.asnumpy().tolist() == [-1, -1]


def test_a_write_after_backward_does_not_change_what_backward_reads():
    """The backward pass reads x and the recorded h, on another context's lane than the writes."""
    x = leaf(1, 2)
    with autograd.record():
        h = x * x
        y = h * h
    event = held(mx.cpu())
    y.backward()
    h[:] = 100  # waits for the backward pass, like a write to x
    other = nd.ones((2,), ctx=mx.gpu(0))
    other.copyto(x)  # runs on the copying lane
    assert not h.chunk.writer.ended
    event.set()
    assert x.grad.asnumpy().tolist() == [4, 32]
    assert x.asnumpy().tolist() == [1, 1]


def test_losses_on_two_contexts_are_differentiated_side_by_side():
    xs = [leaf(1, 2, ctx=mx.gpu(i)) for i in range(2)]
    with autograd.record():
        ys = [x * x for x in xs]
    event = held(mx.gpu(0))
    autograd.backward(ys)
    assert xs[1].grad.asnumpy().tolist() == [2, 4]  # while gpu(0) is busy
    event.set()
    assert xs[0].grad.asnumpy().tolist() == [2, 4]


def test_detach_and_pause_record_nothing():
    x = leaf(2)
    with autograd.record():
        y = x * x
        u = y.detach()
        with autograd.pause():
            w = x * 100
        z = u * x
    assert not w.is_tracked
    z.backward()
    assert x.grad.asnumpy().tolist() == [4]


def test_the_modes():
    seen = [(autograd.is_recording(), autograd.is_training())]
    with autograd.record():
        seen.append((autograd.is_recording(), autograd.is_training()))
        with autograd.predict_mode():
            seen.append((autograd.is_recording(), autograd.is_training()))
        with autograd.pause():
            seen.append((autograd.is_recording(), autograd.is_training()))
    with autograd.train_mode():
        seen.append((autograd.is_recording(), autograd.is_training()))
    with autograd.record(train_mode=False):
        seen.append((autograd.is_recording(), autograd.is_training()))
    assert seen == [
        (False, False), (True, True), (True, False), (False, False), (False, True), (True, False),
    ]  # fmt: skip


def test_dropout_follows_the_mode():
    x = nd.ones((100,))
    assert (nd.Dropout(x, p=0.5).asnumpy() == 1).all()
    with autograd.train_mode():
        dropped = nd.Dropout(x, p=0.5).asnumpy()
    assert set(dropped) == {0, 2}


def test_gradients_of_gradients():
    x = leaf(3)
    with autograd.record():
        y = x * x * x
        first = autograd.grad(y, x, create_graph=True)
        z = first * first
    z.backward()
    assert first.asscalar() == 27
    assert x.grad.asscalar() == 2 * 27 * 6 * 3


def test_a_write_in_place_while_recording_is_refused():
    x = leaf(1, 2)
    with autograd.record():
        y = x * 2
        with pytest.raises(mx.MXNetError, match=r"\+= changes an array in place while autograd"):
            y += 1
        with pytest.raises(mx.MXNetError, match="while autograd records it"):
            x[:] = 1
        plain = nd.zeros((2,))
        plain += 1  # nothing that is recorded
    assert plain.asnumpy().tolist() == [1, 1]


def is_freed_without(arrays):
    """Remove the only array of a list, and return whether its memory is freed."""
    chunk = weakref.ref(arrays[0].chunk)
    mx.waitall()
    arrays.clear()
    gc.collect()
    return chunk() is None


def test_the_memory_of_a_graph_is_freed_after_its_backward_pass():
    x = leaf(1, 2)
    with autograd.record():
        hidden = [x * x]
        y = hidden[0] * hidden[0]
    y.backward()
    assert is_freed_without(hidden)


def test_the_tape_keeps_no_memory_that_torch_does_not_need():
    x = leaf(1, 2)
    with autograd.record():
        hidden = [x + 1]
        y = hidden[0] + 1
    assert is_freed_without(hidden)
    y.backward()
    assert x.grad.asnumpy().tolist() == [1, 1]


def test_threads_have_modes_of_their_own():
    seen = []
    with autograd.record():
        thread = threading.Thread(target=lambda: seen.append(autograd.is_recording()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_a_chunk_may_go_while_a_backward_pass_is_queued(monkeypatch):
    """A lane frees the last array of an intermediate result between two looks at its chunk."""
    looks = {}

    def gone_at_the_second_look(node):
        looks[node] = looks.get(node, 0) + 1
        return node._chunk() if looks[node] == 1 or node.request != "null" else None

    x = nd.array([1.0, 2.0])
    x.attach_grad()
    with autograd.record():
        y = (x * x).sum()
    monkeypatch.setattr(tape.Node, "chunk", property(gone_at_the_second_look))
    y.backward()
    assert x.grad.asnumpy().tolist() == [2.0, 4.0]
