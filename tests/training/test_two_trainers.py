"""Two open trainers over one model, and one trainer in two threads."""

import copy
import threading

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import InputError
from reference import assert_same_bits

X, Y = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3
PATIENCE_S = 30


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def trainer_of(model, parameters=None, lr=0.1, **options):
    optimizer = torch.optim.SGD(parameters or model.parameters(), lr=lr, momentum=0.9)
    return evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **options)


def plain(model, steps):
    """Take steps in turn with two optimizers, in plain torch."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9) for lr in (0.1, 0.01)]
    for step in range(steps):
        model.zero_grad()
        nn.functional.cross_entropy(model(X), Y).backward()
        optimizers[step % 2].step()
    return model.state_dict()


@pytest.mark.parametrize("devices", [1, 2, ["cpu:0", "cpu:1:own"]], ids=str)
def test_two_trainers_over_one_model_take_turns_as_plain_torch_does(devices):
    model = net()
    expected = plain(copy.deepcopy(model), 6)
    options = {"devices": devices, "shards": 1}
    with trainer_of(model, **options) as first, trainer_of(model, lr=0.01, **options) as second:
        for step in range(6):
            (second if step % 2 else first).step(X, Y)
    assert_same_bits(model.state_dict(), expected)


@pytest.mark.parametrize("in_flight", [(2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("devices", [1, 2], ids=str)
def test_with_steps_in_flight_two_trainers_over_one_model_are_refused(in_flight, devices):
    model = net()
    one, other = (trainer_of(model, devices=devices, max_in_flight=count) for count in in_flight)
    with one:
        with pytest.raises(InputError, match=r"another open trainer trains 0\.weight too"):
            other.open()
        one.step(X, Y)
    with other:
        other.step(X, Y)


def test_trainers_of_different_parameters_may_have_steps_in_flight():
    model = net()
    for layer in model:
        layer.requires_grad_(layer is model[0])
    with trainer_of(model, list(model[0].parameters()), max_in_flight=2) as first:
        first.step(X, Y)
        with trainer_of(net(), max_in_flight=2) as second:
            second.step(X, Y)


@pytest.mark.parametrize("call", ["step", "backward"])
def test_a_step_of_another_thread_is_refused_while_one_is_computed(call):
    model, began, go_on, errors = net(), threading.Event(), threading.Event(), []

    def wait(trainer):
        began.set()
        assert go_on.wait(PATIENCE_S)

    with trainer_of(model, devices=1, after_update=wait) as trainer:

        def step_meanwhile():
            assert began.wait(PATIENCE_S)
            try:
                getattr(trainer, call)(X, Y)
            except InputError as error:
                errors.append(str(error))
            finally:
                go_on.set()

        thread = threading.Thread(target=step_meanwhile, name="the other")
        thread.start()
        trainer.step(X, Y)
        thread.join(PATIENCE_S)
        assert trainer.steps_done == 1
        trainer.step(X, Y)
    (error,) = errors
    assert error.startswith("the thread the other began a step while another thread computes one")


def test_two_threads_may_take_turns():
    model = net()
    with trainer_of(model, devices=1) as trainer:
        trainer.step(X, Y)
        thread = threading.Thread(target=trainer.step, args=(X, Y))
        thread.start()
        thread.join(PATIENCE_S)
        trainer.step(X, Y)
        assert trainer.steps_done == 3
