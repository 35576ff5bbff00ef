"""`Trainer.backward`: exact mean gradients on any devices; the user makes the update."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.errors import ContractError, ModelError, NonFiniteLossError
from grouping import grouped
from layouts import own
from reference import assert_same_bits, whole_state
from trainers import LAYOUTS, sgd
from zoo import ZOO, build, make_batches, options_of

SIZES = (24, 17, 24, 19)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)


def trained(step, name="convolution", make_optimizer=sgd, **options):
    """Train by `step(trainer, X, y)`; return the state and the losses."""
    model = build(name)
    optimizer = make_optimizer(model.parameters() if make_optimizer is not sgd else model)
    options = {**options_of(model), **options}
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **grouped(**options)) as trainer:
        losses = [float(step(trainer, X, y)) for X, y in make_batches(SIZES)]
        assert trainer.steps_done == len(SIZES)
        assert trainer.cursor.step == len(SIZES)
    return whole_state(model, optimizer), losses


def in_one_call(trainer, X, y):
    return trainer.step(X, y)


def in_two_calls(trainer, X, y):
    loss = trainer.backward(X, y)
    trainer.optimizer.step()
    return loss


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.thinned(2)
def test_a_step_is_backward_and_an_update(name):
    expected = trained(in_one_call, name, ADAM, devices=1)
    for devices in (2, own(3)):
        state, losses = trained(in_two_calls, name, ADAM, devices=devices)
        assert_same_bits(state, expected[0])
        assert losses == expected[1]


def in_turns():
    turns = itertools.cycle([in_one_call, in_two_calls])
    return lambda trainer, X, y: next(turns)(trainer, X, y)


@functools.cache
def alone():
    return trained(in_one_call, devices=1)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(
    ("devices", "step"), [*((devices, in_two_calls) for devices in LAYOUTS), (2, in_turns())]
)
def test_on_every_layout(devices, step, in_flight):
    """Steps and backward passes may take turns, too."""
    state, losses = trained(step, devices=devices, max_in_flight=in_flight)
    assert_same_bits(state, alone()[0])
    assert losses == alone()[1]


def opened(model, **options):
    options = {"devices": 2, **options}
    return evenstep.Trainer(model, sgd(model), nn.CrossEntropyLoss(), **grouped(**options))


@pytest.mark.parametrize("weights", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("images", [torch.contiguous_format, torch.channels_last])
def test_one_shard_gives_the_gradients_of_the_plain_loop(images, weights):
    ((X, y),) = make_batches((24,))
    plain, model = (build("convolution").to(memory_format=weights) for _ in range(2))
    X = X.to(memory_format=images)
    F.cross_entropy(plain(X), y).backward()
    with opened(model, shards=1) as trainer:
        trainer.backward(X, y)
        for ours, its in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, its.grad)
            sizes = [size > 1 for size in ours.shape]  # others have no stride that matters
            for strides in zip(sizes, ours.grad.stride(), its.grad.stride(), strict=True):
                assert not strides[0] or strides[1] == strides[2]


def test_gradients_replace_those_before_or_are_added_to_them():
    first, second = make_batches((24, 17))
    model = build("convolution")
    with opened(model) as trainer:
        each = []
        for batch in (first, second):
            trainer.backward(*batch)
            each.append([parameter.grad.clone() for parameter in model.parameters()])
        trainer.backward(*first)
        assert_same_gradients(model, each[0])
        trainer.backward(*second, accumulate=True)
        assert_same_gradients(model, [a + b for a, b in zip(*each, strict=True)])


def assert_same_gradients(model, expected):
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_accumulating_needs_no_gradients_before():
    ((X, y),) = make_batches((24,))
    model, expected = build("convolution"), build("convolution")
    for one, options in ((model, {"accumulate": True}), (expected, {})):
        with opened(one) as trainer:
            trainer.backward(X, y, **options)
    assert_same_gradients(model, [parameter.grad for parameter in expected.parameters()])


def test_an_error_leaves_model_gradients_and_place():
    ((X, y),) = make_batches((24,))
    model = build("batch_norm")
    with opened(model) as trainer:
        trainer.backward(X, y)
        state = whole_state(model, trainer.optimizer)
        before = [parameter.grad.clone() for parameter in model.parameters()]
        with pytest.raises(NonFiniteLossError):
            trainer.backward(torch.full_like(X, torch.inf), y)
        assert_same_bits(whole_state(model, trainer.optimizer), state)
        assert_same_gradients(model, before)
        assert trainer.steps_done == 1


def test_hooks_of_gradients_are_called_and_those_of_the_update_are_not():
    ((X, y),) = make_batches((24,))
    model, called = build("convolution"), []
    next(model.parameters()).register_hook(lambda gradient: called.append("gradient"))
    hooks = {
        name: lambda module, name=name: called.append(name)
        for name in ("before_update", "after_update")
    }
    with opened(model, **hooks) as trainer:
        trainer.backward(X, y)
    assert called == ["gradient"]


def test_only_after_backward_the_optimizer_is_the_users():
    first, second, third = make_batches((24, 24, 24))
    with opened(build("convolution")) as trainer:
        trainer.step(*first)
        with pytest.raises(ContractError, match=r"trainer\.backward"):
            trainer.optimizer.step()
        trainer.backward(*second)
        trainer.optimizer.step()
        trainer.step(*third)
        with pytest.raises(ContractError, match=r"SGD\.step\(\) was called"):
            trainer.optimizer.step()


def test_a_closure_may_call_backward():
    batches = make_batches((24, 17))

    def by_closure(trainer, X, y):
        losses = []

        def closure():
            trainer.optimizer.zero_grad()
            losses.append(float(trainer.backward(X, y)))
            return losses[-1]

        trainer.optimizer.step(closure)
        return losses[0]

    results = []
    for step, devices in ((in_one_call, 1), (by_closure, 1), (by_closure, 3)):
        model = build("convolution")
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
        with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), devices=devices) as trainer:
            losses = [float(step(trainer, X, y)) for X, y in batches]
        results.append((trainer.fingerprint(), losses))
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_parameters_may_be_written_between_two_calls(in_flight):
    """SAM: the gradient at a point nearby."""
    results = []
    for devices in (1, 2, own(3)):
        model = build("convolution")
        with opened(model, devices=devices, max_in_flight=in_flight) as trainer:
            for X, y in make_batches((24, 17)):
                trainer.backward(X, y)
                way = [0.1 * parameter.grad for parameter in model.parameters()]
                move(model, way, 1)
                trainer.backward(X, y)
                move(model, way, -1)
                trainer.optimizer.step()
            results.append(whole_state(model, trainer.optimizer))
    for state in results[1:]:
        assert_same_bits(state, results[0])


def move(model, way, sign):
    with torch.no_grad():
        for parameter, step in zip(model.parameters(), way, strict=True):
            parameter.add_(step, alpha=sign)


# ---- other objectives


class Adversaries(nn.Module):
    """A generator, and a discriminator with dropout."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 1))


def of_discriminator(model, real, noise):
    fake = model.generator(noise).detach()
    scores = torch.cat([model.discriminator(real), model.discriminator(fake)])
    wanted = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
    return F.binary_cross_entropy_with_logits(scores, wanted, reduction="sum"), 2 * len(real)


def of_generator(model, real, noise):
    scores = model.discriminator(model.generator(noise))
    wanted = torch.ones_like(scores)
    return F.binary_cross_entropy_with_logits(scores, wanted, reduction="sum"), len(real)


def adversarial_training(devices, **options):
    torch.manual_seed(0)
    model = Adversaries()
    optimizer_d = ADAM(model.discriminator.parameters())
    optimizer_g = ADAM(model.generator.parameters())
    losses = []
    with evenstep.Trainer(
        model, optimizer_d, **grouped(objective=of_discriminator, devices=devices, **options)
    ) as trainer:
        for _ in range(4):
            batch = torch.randn(20, 6), torch.randn(20, 4)
            losses.append(float(trainer.step(*batch)))
            losses.append(float(trainer.backward(*batch, objective=of_generator)))
            optimizer_g.step()
    return whole_state(model, optimizer_d), whole_state(model.generator, optimizer_g), losses


@pytest.mark.parametrize("in_flight", [1, 2])
def test_two_objectives_and_two_optimizers(in_flight):
    *expected, losses = adversarial_training(1)
    for devices in (2, 3, own(2)):
        *states, got = adversarial_training(devices, max_in_flight=in_flight)
        for state, its in zip(states, expected, strict=True):
            assert_same_bits(state, its)
        assert got == losses
    assert losses[0] != losses[2]


@pytest.mark.slow
def test_a_compiled_training_computes_other_objectives_eagerly():
    batch = torch.ones(16, 6), torch.ones(16, 4)  # shards of one size: one program
    results = []
    for devices in (1, 2):
        torch.manual_seed(0)
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        objective = functools.partial(squares, 1.0)
        options = grouped(objective=objective, devices=devices, compile=True)
        with evenstep.Trainer(model, optimizer, **options) as trainer:
            trainer.step(*batch)
            loss = trainer.backward(*batch, objective=functools.partial(squares, 3.0))
            optimizer.step()
            results.append((float(loss), trainer.fingerprint()))
            assert float(trainer.backward(*batch, objective=objective)) != float(loss)
    assert results[0] == results[1]


def squares(wanted, model, X, noise):
    return (model(X) - wanted).square().sum(), len(X)


def test_the_contract_of_a_new_objective_is_checked_once():
    ((X, y),) = make_batches((24,))
    model, hidden = build("convolution"), nn.Linear(5, 5)
    with opened(model) as trainer:
        trainer.step(X, y)
        first = trainer.contract

        def reaches_another_module(module, X, y):
            return F.cross_entropy(hidden(module(X)), y, reduction="sum"), len(y)

        with pytest.raises(ContractError, match="Linear outside the model"):
            trainer.backward(X, y, objective=reaches_another_module)
        assert hidden.weight.grad is None
        reports = [first]
        for weight in (1.0, 2.0):  # defined anew in each turn of a loop

            def weighted(module, X, y, weight=weight):
                return weight * F.cross_entropy(module(X), y, reduction="sum"), len(y)

            trainer.backward(X, y, objective=weighted)
            reports.append(trainer.contract)
        assert reports[1] is not first
        assert reports[2] is reports[1]


@pytest.mark.parametrize("devices", [2, own(2)], ids=str)
def test_a_new_objective_must_use_the_model_that_it_is_given(devices):
    ((X, y),) = make_batches((24,))
    model = build("convolution")
    with opened(model, devices=devices, check="off") as trainer:
        trainer.step(X, y)
        with pytest.raises(ModelError, match="must call the model that it is given"):
            trainer.backward(
                X, y, objective=lambda _, X, y: (F.cross_entropy(model(X), y) * len(y), len(y))
            )
