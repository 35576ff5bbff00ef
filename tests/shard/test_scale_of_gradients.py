"""Inside the backward pass, gradients have the scale of plain torch's, whatever V is.

So code that is not linear in a gradient (a limit in a custom function or a hook) gives the weights
of the plain loop over whole batches, and narrow numbers overflow no earlier than there.
"""

import copy

import pytest
import torch
from torch import nn

from layouts import mixed
from reference import assert_same_bits, plain_training, reference_training, whole_state
from trainers import open_trainer

EXAMPLES = 13
LIMIT = 0.004


class Limited(torch.autograd.Function):
    """The identity, whose gradient is limited element by element."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-LIMIT, LIMIT)


def limited_by_a_hook(x):
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient.clamp(-LIMIT, LIMIT))
    return x


class Net(nn.Module):
    """Two layers, with something between them that depends on the scale of a gradient."""

    def __init__(self, between, shape=(4,)):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4 * len(shape) ** 2)
        self.between, self.shape = between, shape

    def forward(self, x):
        return self.second(self.between(torch.tanh(self.first(x)))).reshape(-1, *self.shape)


def classes(generator):
    return torch.randint(4, (EXAMPLES,), generator=generator)


def pixels(generator):
    return torch.randint(4, (EXAMPLES, 4), generator=generator)


def probabilities(generator):
    return torch.rand(EXAMPLES, 4, generator=generator, dtype=torch.float64).softmax(1)


LOSSES = {
    "cross entropy": (nn.CrossEntropyLoss(), classes, (4,)),
    "cross entropy of pixels": (nn.CrossEntropyLoss(), pixels, (4, 4)),
    "cross entropy of probabilities": (nn.CrossEntropyLoss(), probabilities, (4,)),
    "squares": (nn.MSELoss(), probabilities, (4,)),
    "absolute differences": (nn.L1Loss(), probabilities, (4,)),
}


def problem(name, between):
    loss, target_of, shape = LOSSES[name]
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    inputs = [torch.randn(EXAMPLES, 6, generator=generator).double() for _ in range(3)]
    batches = [(x, target_of(generator)) for x in inputs]
    return Net(between, shape).double(), batches, loss


def plain(model, batches, loss):
    """Return a copy of the model, trained by the plain loop over whole batches."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    plain_training(model, optimizer, batches, loss)
    return model


def trained(model, batches, loss, **options):
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with open_trainer(model, loss, optimizer=optimizer, **options) as trainer:
        losses = [trainer.step(*batch).item() for batch in batches]
    return model, optimizer, losses


# Every loss with each way to limit, and with each number of shards.
@pytest.mark.parametrize(
    ("between", "shards", "devices"),
    [
        (Limited.apply, 1, 1),
        (limited_by_a_hook, 2, 1),
        (Limited.apply, 5, mixed(2)),
        (limited_by_a_hook, 13, mixed(2)),
    ],
    ids=["one shard", "two shards", "five shards", "a shard for each example"],
)
@pytest.mark.parametrize("name", LOSSES)
def test_a_limit_inside_the_graph_acts_as_in_the_plain_loop(name, between, shards, devices):
    model, batches, loss = problem(name, between)
    expected = plain(model, batches, loss)
    found, _, _ = trained(model, batches, loss, shards=shards, devices=devices)
    for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_the_limit_of_these_tests_limits():
    model, batches, loss = problem("cross entropy", Limited.apply)
    free = copy.deepcopy(model)
    free.between = nn.Identity()
    expected, unlimited = plain(model, batches, loss), plain(free, batches, loss)
    difference = (expected.first.weight - unlimited.first.weight).abs().max()
    assert difference > 1e-3


@pytest.mark.parametrize("shards", [2, 5])
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_is_the_plain_loop_that_accumulates_parts_of_the_mean(name, shards):
    model, batches, loss = problem(name, Limited.apply)
    model = model.float()
    batches = [[t.float() if t.is_floating_point() else t for t in batch] for batch in batches]
    expected, losses = reference_training(
        model, lambda p: torch.optim.SGD(p, 0.5), batches, shards=shards, loss=loss
    )
    found, optimizer, ours = trained(model, batches, loss, shards=shards, devices=2)
    assert_same_bits(whole_state(found, optimizer), expected)
    assert ours == losses


def test_a_total_too_large_for_float16_does_not_overflow():
    torch.manual_seed(0)
    model = nn.Linear(3, 1).half()
    x = torch.full((256, 3), 20.0, dtype=torch.float16)
    y = torch.full((256, 1), 40.0, dtype=torch.float16)
    expected = plain(model, [(x, y)], lambda output, target: nn.functional.mse_loss(output, target))
    assert expected.weight.isfinite().all()
    found, _, losses = trained(model, [(x, y)], nn.MSELoss(), shards=4)
    torch.testing.assert_close(found.weight, expected.weight, rtol=4e-3, atol=0)
    assert losses == pytest.approx([nn.functional.mse_loss(model(x), y).item()], rel=2e-3)


def test_batch_norm_in_float16_averages_what_its_shards_leave():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).half()
    model[0].momentum = 1.0
    x = torch.full((512, 3), 500.0, dtype=torch.float16) + torch.arange(512).half()[:, None] % 2
    y = torch.zeros(512, 1, dtype=torch.float16)
    found, _, _ = trained(model, [(x, y)], nn.MSELoss(), shards=2)
    torch.testing.assert_close(found[0].running_mean, torch.full((3,), 500.5).half())
