"""`parameter.register_hook`: called once for each step, with the mean gradient of the batch."""

import contextlib
import functools
import itertools

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import ContractError, ModelError
from grouping import grouped
from layouts import own
from reference import assert_same_bits, plain_training, whole_state
from trainers import open_trainer

LAYOUTS = [1, 2, 3, own(2), own(3)]
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def build(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


def batches(sizes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 6, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(4, (size,), generator=generator),
        )
        for size in sizes
    ]


def clip(gradient):
    """A hook that is not linear: what it makes of sums is not the sum of what it makes."""
    return gradient.clamp(-0.01, 0.01)


def hook(model):
    """Register several hooks: on one parameter they are called one after the other."""
    model[0].weight.register_hook(clip)
    model[2].weight.register_hook(lambda gradient: gradient.sign() * 0.01)
    model[2].weight.register_hook(lambda gradient: gradient + 0.003)
    model[2].bias.register_hook(lambda gradient: None)
    return model


def train(data, model, **options):
    optimizer = SGD(model.parameters())
    options = {"devices": 2, **options}
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **grouped(**options)) as trainer:
        losses = [float(loss) for loss in [trainer.step(*batch) for batch in data]]
    return whole_state(model, optimizer), losses, trainer


def plain(data, model):
    optimizer = SGD(model.parameters())
    losses = plain_training(model, optimizer, data)
    return whole_state(model, optimizer), losses


@pytest.mark.parametrize("devices", [1, own(2)], ids=str)
def test_one_shard_is_the_plain_loop_bit_for_bit(devices):
    data = batches((24, 17, 9))
    expected, losses = plain(data, hook(build()))
    state, found, _ = train(data, hook(build()), shards=1, devices=devices)
    assert found == losses
    assert_same_bits(state, expected)


def test_a_hook_sees_the_mean_gradient_of_the_batch():
    """That all layouts have these bits is the next test's claim."""
    data = batches((32, 21), torch.float64)
    expected, losses = plain(data, hook(build(torch.float64)))
    state, found, _ = train(data, hook(build(torch.float64)))
    assert found == pytest.approx(losses, rel=1e-12)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-13)


def test_every_layout_has_the_same_bits():
    data = batches((32, 21, 5))
    expected, losses, _ = train(data, hook(build()), devices=1)
    for devices, max_in_flight in itertools.product(LAYOUTS, (1, 2)):
        options = {"devices": devices, "max_in_flight": max_in_flight}
        state, found, _ = train(data, hook(build()), **options)
        assert found == losses
        assert_same_bits(state, expected)


@pytest.mark.parametrize("devices", LAYOUTS, ids=str)
def test_a_hook_is_called_once_for_each_step_and_before_before_update(devices):
    model, seen, order = build(), [], []
    model[0].weight.register_hook(lambda gradient: order.append("hook") or seen.append(gradient))

    def before_update(module):
        order.append("before_update")
        assert torch.equal(module[0].weight.grad, seen[-1])

    train(batches((32, 21)), model, devices=devices, before_update=before_update)
    assert order == ["hook", "before_update"] * 2
    assert not seen[0].requires_grad


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("devices", [1, 2, own(2)], ids=str)
def test_hooks_may_come_and_go_between_steps(devices, max_in_flight):
    def run(devices, max_in_flight):
        data, model = batches((32, 21, 16)), build()
        with open_trainer(model, devices=devices, max_in_flight=max_in_flight) as trainer:
            trainer.step(*data[0])
            handle = model[0].weight.register_hook(clip)
            trainer.step(*data[1])
            trainer.waitall()
            assert model[0].weight.grad.abs().max() <= 0.01
            handle.remove()
            trainer.step(*data[2])
            trainer.waitall()
            assert model[0].weight.grad.abs().max() > 0.01
            return trainer.fingerprint()

    assert run(devices, max_in_flight) == run(1, 1)


@pytest.mark.parametrize("devices", [1, 2, own(2)], ids=str)
def test_a_step_in_flight_has_the_hooks_of_when_it_was_submitted(devices):
    def run(take):
        model = build()
        kept, removed = model[0].weight.register_hook(clip), model[2].weight.register_hook(clip)
        for number, batch in enumerate(batches((32, 21, 16, 24))):
            if number == 2:
                removed.remove()
                kept.remove()
                model[0].weight.register_hook(torch.sign)
            take(model)(batch)
        return model.state_dict()

    def plainly(model):
        optimizer = optimizers.setdefault(model, SGD(model.parameters()))
        return lambda batch: plain_training(model, optimizer, [batch])

    optimizers = {}
    expected = run(plainly)
    with contextlib.ExitStack() as opened:
        options = {"devices": devices, "max_in_flight": 2, "shards": 1}

        @functools.cache
        def trainer_of(model):
            optimizer = SGD(model.parameters())
            return opened.enter_context(open_trainer(model, optimizer=optimizer, **options))

        found = run(lambda model: lambda batch: trainer_of(model).step(*batch))
    assert_same_bits(found, expected)


def test_a_hook_is_not_called_where_there_is_no_gradient():
    model, called = build(), []
    model[0].weight.register_hook(called.append)
    model[0].requires_grad_(False)
    train(batches((32,)), model)
    assert called == []


@pytest.mark.slow
def test_hooks_of_compiled_shards_see_the_mean_too():
    data = batches((32, 21))
    state, _, trainer = train(data, hook(build()), compile=True)
    assert not trainer.hybridized.why_not
    expected, _ = plain(data, hook(build()))
    for name in ("parameter/0.weight", "parameter/2.bias"):
        torch.testing.assert_close(state[name], expected[name], rtol=1e-3, atol=1e-5)


def test_a_hook_that_returns_something_else_is_refused():
    model = build()
    model[0].weight.register_hook(lambda gradient: gradient.sum())
    untouched = build()
    with pytest.raises(ModelError, match=r"a hook of the parameter 0\.weight returned .* \(8, 6\)"):
        train(batches((32,)), model)
    assert_same_bits(model.state_dict(), untouched.state_dict())


def test_hooks_of_an_optimizer_that_evaluates_often():
    def run(devices):
        model = build()
        model[0].weight.register_hook(clip)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), devices=devices) as trainer:
            trainer.step(*batches((32,))[0])
            assert model[0].weight.grad.abs().max() <= 0.01
            return trainer.fingerprint()

    assert run(1) == run(2) == run(own(2))


def test_a_hook_on_an_accumulated_gradient_is_refused_with_what_to_use():
    model = build()
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ContractError, match=r"0\.weight has a hook .*before_update.*register_hook"):
        train([], model)
