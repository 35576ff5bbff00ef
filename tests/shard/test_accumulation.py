"""A shard's own gradient is all that its code can see, wherever it is accumulated."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from layouts import own
from reference import assert_same_bits, whole_state
from trainers import open_trainer

LAYOUTS = [1, 3, own(2)]
ROWS, CLASSES = 4, 3


class Lookup(nn.Module):
    """Looks rows of a table up: densely in shards that begin with 0, sparsely in the others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(ROWS, CLASSES))

    def forward(self, ids):
        if ids[0] == 0:
            return self.table[ids]
        return F.embedding(ids, self.table, sparse=True)


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def dense_batches():
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(size, 6, generator=generator),
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for size in (32, 21)
    ]


def lookups(first):
    """64 examples, 8 to a shard; `first` has the first id of each shard."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, ROWS, (64,), generator=generator)
    ids[::8] = torch.tensor(first)
    return [(ids, torch.randint(CLASSES, (64,), generator=generator))] * 3


def summed(model, X, y):
    return F.cross_entropy(model(X), y, reduction="sum"), len(y)


def train(model, data, objective, *, each_alone=False, **options):
    """Train; with `each_alone`, an observer keeps every shard's gradients apart."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"objective": objective, "check": "off", **options}
    with open_trainer(model, optimizer=optimizer, **options) as trainer:
        if each_alone:
            trainer.on_shard = lambda shard, value: None
        losses = [float(trainer.step(*batch)) for batch in data]
    return whole_state(model, optimizer), losses


def assert_as_each_alone(make, data, objective):
    expected, losses = train(make(), data, objective, devices=1, each_alone=True)
    for devices in LAYOUTS:
        state, found = train(make(), data, objective, devices=devices)
        assert found == losses
        assert_same_bits(state, expected)


@pytest.mark.parametrize(
    "first", [[1, 0] * 4, [1, 0, 0, 1, 0, 1, 0, 1], [0, 1] * 4, [0, 0, 0, 1, 0, 0, 0, 0]]
)
def test_sparse_gradients_of_some_shards(first):
    assert_as_each_alone(Lookup, lookups(first), summed)


def with_penalty(model, X, y):
    """A penalty on the gradient's norm, by torch.autograd.grad."""
    loss = F.cross_entropy(model(X), y, reduction="sum")
    (slope,) = torch.autograd.grad(loss, [model[0].weight], create_graph=True)
    return loss + 1e-3 * slope.square().sum(), len(y)


def with_penalty_on_grad(model, X, y):
    """The same by backward(create_graph=True), and what it leaves in `parameter.grad`."""
    loss = F.cross_entropy(model(X), y, reduction="sum")
    loss.backward(create_graph=True)
    return loss + 1e-3 * model[0].weight.grad.square().sum(), len(y)


def with_a_second_backward(model, X, y):
    """A backward pass of its own, before the one of the step."""
    F.cross_entropy(model(X), y, reduction="sum").backward()
    return summed(model, X, y)


def that_reads_gradients(model, X, y):
    """A loss that depends on whether there is a gradient."""
    total, count = summed(model, X, y)
    return total * (1 if model[0].weight.grad is None else 2), count


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize(
    "objective",
    [with_penalty, with_penalty_on_grad, with_a_second_backward, that_reads_gradients],
)
def test_gradients_in_an_objective_are_the_shards_own(objective):
    assert_as_each_alone(net, dense_batches(), objective)


def test_a_hook_of_a_module_sees_the_shards_own_gradient():
    seen = []

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()
            self.net[2].register_full_backward_hook(self.read)

        def read(self, module, grad_inputs, grad_outputs):
            gradient = self.net[0].bias.grad
            seen.append(None if gradient is None else gradient.tolist())

        def forward(self, x):
            return self.net(x)

    data = dense_batches()[:1]
    train(Reads(), data, summed, devices=1, each_alone=True)
    expected, seen[:] = [*seen], []
    train(Reads(), data, summed, devices=1)
    assert seen == expected
