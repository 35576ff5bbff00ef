"""The handle of a step's loss can be used like a number, and each use waits."""

import math
import operator

import numpy as np
import pytest
import torch

from evenstep.engine import PendingNumber


class Late(PendingNumber):
    """A number that counts how often it was waited for."""

    __slots__ = ("number", "waits")

    def __init__(self, number):
        self.number, self.waits = number, 0

    def wait_to_read(self):
        self.waits += 1

    def value_in_task(self):
        assert self.waits
        return self.number


@pytest.mark.parametrize("name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow"])
def test_arithmetic(name):
    function = getattr(operator, name)
    for ours in (function(Late(2.5), 2), function(Late(2.5), Late(2.0))):
        assert ours == function(2.5, 2)
        assert type(ours) is float
    assert function(2, Late(2.5)) == function(2, 2.5)


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge", "eq", "ne"])
@pytest.mark.parametrize("other", [2.0, 2.5, 3.0])
def test_comparisons(name, other):
    function = getattr(operator, name)
    assert function(Late(2.5), other) is function(2.5, other)
    assert function(Late(2.5), Late(other)) is function(2.5, other)


def test_every_use_waits():
    loss = Late(2.5)
    uses = [float, abs, operator.neg, round, math.isnan, np.asarray, "{:.3f}".format, bool]
    for count, use in enumerate(uses, 1):
        use(loss)
        assert loss.waits == count


def test_what_a_loop_does_with_a_loss():
    losses = [Late(0.5), Late(2.0)]
    total = 0.0
    for loss in losses:
        total += loss
    assert total == sum(losses) == 2.5
    assert max(losses) is losses[1]
    assert np.mean(losses) == 1.25
    assert round(losses[0]) == 0
    assert round(Late(1.237), 2) == 1.24
    assert f"{losses[1]:8.2f}" == "    2.00"
    assert torch.tensor(2.0) * float(losses[0]) == 1.0
    assert len({*losses}) == 2


def test_arrays_stay_arrays():
    assert (Late(2.0) * np.array([1.0, 2.0])).tolist() == [2.0, 4.0]
    assert np.asarray(Late(2.0), dtype="float32").dtype == np.float32


def test_tensorboard_takes_it(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard", exc_type=ImportError)
    with tensorboard.SummaryWriter(tmp_path) as writer:
        writer.add_scalar("loss", Late(2.5), 1)
    assert [*tmp_path.iterdir()]
