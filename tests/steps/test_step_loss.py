"""The handle of a step's loss can be used like a number, and each use waits."""

import math
import operator

import numpy as np
import pytest
import torch

from evenstep.engine import PendingNumber
from evenstep.errors import InputError


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


USES = {
    "tensor": torch.tensor,
    "as_tensor": torch.as_tensor,
    "stack": lambda loss: torch.stack([loss])[0],
    "stack with a tensor": lambda loss: torch.stack([torch.tensor(1.0), loss])[1],
    "mean": lambda loss: loss.mean(),
    "torch.mean": torch.mean,
    "data": lambda loss: loss.data,
    "detach": lambda loss: loss.detach(),
    "cpu": lambda loss: loss.cpu(),
    "detach().cpu()": lambda loss: loss.detach().cpu(),
    "a sum": lambda loss: torch.zeros(()) + loss,
    "in place": lambda loss: torch.zeros(()).add_(loss),
    "a list": lambda loss: torch.stack([loss, loss]).mean(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_in_functions_of_torch_it_is_a_scalar_on_the_cpu(use):
    loss = Late(2.5)
    found = use(loss)
    assert loss.waits
    assert found.device.type == "cpu"
    assert found.dtype is torch.float32
    assert not found.requires_grad
    assert torch.equal(found, torch.tensor(2.5))


def test_torchs_predicates():
    assert not torch.isnan(Late(2.5))
    assert torch.isnan(Late(math.nan))
    assert torch.isfinite(Late(2.5))
    assert np.mean(Late(2.5)) == 2.5
    assert torch.tensor(2.0) < Late(2.5)


def test_a_sum_with_a_graph_is_refused():
    penalty = torch.ones((), requires_grad=True)
    for combine in (lambda: penalty + Late(2.5), lambda: torch.stack([penalty, Late(2.5)])):
        with pytest.raises(InputError, match=r"no graph.* float\(loss\)"):
            combine()
    with torch.no_grad():
        assert penalty + Late(2.5) == 3.5
