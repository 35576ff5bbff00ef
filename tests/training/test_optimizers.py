"""Every torch optimizer, used as it is, gives one result on any layout."""

import functools

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import NonFiniteLossError
from grouping import grouped
from layouts import own, shared
from optimizers import OPTIMIZERS, SETTINGS, embedding, model_for
from reference import assert_same_bits, reference_training, whole_state
from zoo import build, make_batches

LAYOUTS = [shared(2), own(2), shared(3)]


def train(cls, devices, batches):
    model = model_for(cls)
    optimizer = cls(model.parameters(), **SETTINGS.get(cls, {}))
    loss = nn.CrossEntropyLoss()
    with evenstep.Trainer(model, optimizer, loss, devices=devices) as trainer:
        losses = [float(trainer.step(X, y)) for X, y in batches]
    return whole_state(model, optimizer), losses


@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__name__)
@pytest.mark.thinned(2)
def test_every_torch_optimizer_on_every_layout(cls):
    """Dense ones give the reference's bits, too."""
    batches = make_batches((24, 17, 24))
    expected, losses = train(cls, 1, batches)
    for devices in LAYOUTS:
        state, other_losses = train(cls, devices, batches)
        assert_same_bits(state, expected)
        assert other_losses == losses
    assert losses[0] != losses[-1]
    if cls not in (torch.optim.LBFGS, torch.optim.SparseAdam):
        make_optimizer = functools.partial(cls, **SETTINGS.get(cls, {}))
        reference = reference_training(model_for(cls), make_optimizer, batches, shards=8)
        assert_same_bits(expected, reference[0])
        assert losses == reference[1]


def test_lbfgs_with_one_shard_is_plain_lbfgs():
    X, y = make_batches((24,))[0]
    plain = build("convolution")
    optimizer = torch.optim.LBFGS(plain.parameters(), lr=0.1, max_iter=4)

    def closure():
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(plain(X), y)
        value.backward()
        return value

    optimizer.step(closure)
    model = build("convolution")
    ours = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    options = grouped(devices=2, shards=1, memory_format="contiguous")
    with evenstep.Trainer(model, ours, nn.CrossEntropyLoss(), **options) as trainer:
        trainer.step(X, y)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, its)


class Extragradient(torch.optim.Optimizer):
    """Takes the gradient where a first step would lead; it can't step without a closure."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):
        evaluate = torch.enable_grad()(closure)
        loss = evaluate()
        pairs = [(one, g["lr"]) for g in self.param_groups for one in g["params"]]
        before = [one.clone() for one, _ in pairs]
        move(pairs, before)
        evaluate()
        move(pairs, before)
        return loss


def move(pairs, before):
    for (one, rate), start in zip(pairs, before, strict=True):
        one.copy_(start - rate * one.grad)


def with_closures(model, X, y, steps):
    optimizer = Extragradient(model.parameters(), lr=0.1)

    def closure():
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(model(X), y)
        value.backward()
        return value

    return [float(optimizer.step(closure).detach()) for _ in range(steps)]


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_an_optimizer_of_ones_own_that_needs_a_closure_gets_it(shards, in_flight):
    X, y = make_batches((24,))[0]
    plain = build("convolution").double()
    expected = with_closures(plain, X.double(), y, steps=3)
    model = build("convolution").double()
    ours = Extragradient(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(ours, lambda step: 1.0)  # it wraps `step`
    options = {"devices": 2, "shards": shards, "max_in_flight": in_flight}
    with evenstep.Trainer(model, ours, nn.CrossEntropyLoss(), **options) as trainer:
        losses = [float(trainer.step(X.double(), y)) for _ in range(3)]
    assert losses == pytest.approx(expected, rel=1e-12)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("devices", [1, 2, own(2)], ids=str)
def test_lbfgs_that_fails_between_evaluations_leaves_everything_as_it_was(devices, steps_before):
    X, y = make_batches((24,))[0]
    model = build("convolution")
    optimizer = torch.optim.LBFGS(model.parameters(), **SETTINGS[torch.optim.LBFGS])
    evaluations = []
    fails = False

    def loss(output, target):
        value = nn.functional.cross_entropy(output, target)
        return value * torch.nan if fails and len(evaluations) > 1 else value

    def counted(module):
        evaluations.append(module)

    options = {"devices": devices, "before_update": counted}
    with evenstep.Trainer(model, optimizer, loss, **options) as trainer:
        for _ in range(steps_before):
            trainer.step(X, y)
        evaluations.clear()
        fails = True
        before = trainer.fingerprint()
        with pytest.raises(NonFiniteLossError):
            trainer.step(X, y)
        assert len(evaluations) == 2  # the parameters had been moved
        assert trainer.fingerprint() == before
        assert trainer.steps_done == steps_before
        fails = False
        trainer.step(X, y)
        after = trainer.fingerprint()
    undisturbed = build("convolution")
    again = torch.optim.LBFGS(undisturbed.parameters(), **SETTINGS[torch.optim.LBFGS])
    with evenstep.Trainer(undisturbed, again, loss, devices=1) as trainer:
        for _ in range(steps_before + 1):
            trainer.step(X, y)
        assert trainer.fingerprint() == after


def test_groups_with_their_own_rates_and_a_scheduler():
    batches = make_batches((16, 16, 16, 16))

    def run(devices):
        model = build("convolution")
        head, body = list(model[4].parameters()), list(model[0].parameters())
        optimizer = torch.optim.SGD([{"params": body, "lr": 0.01}, {"params": head}], lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.05, 0.5], total_steps=5)
        options = {"devices": devices, "scheduler": scheduler}
        with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **options) as trainer:
            for X, y in batches:
                trainer.step(X, y)
                scheduler.step()
            return trainer.fingerprint(), [group["lr"] for group in optimizer.param_groups]

    one = run(1)
    assert one[1][0] != one[1][1]
    assert all(run(devices) == one for devices in LAYOUTS)


def test_sparse_gradients_are_summed_exactly():
    """Against the same table with dense gradients, whose sum is the reference's."""
    batches = make_batches((24, 17))

    def run(sparse, devices):
        model = embedding()
        model.table.sparse = sparse
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), devices=devices) as trainer:
            for X, y in batches:
                trainer.step(X, y)
            assert model.table.weight.grad.is_sparse == sparse
        return model.table.weight.detach().clone()

    results = [run(True, devices) for devices in (1, *LAYOUTS)]
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], run(False, 1))
