"""Gradients of the user's own in `.grad` when `trainer.step` is called: it adds its own to them."""

import functools
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.errors import InputError, NonFiniteLossError
from grouping import grouped
from launched import alone, launched
from layouts import own
from marks import slow
from reference import assert_same_bits, reference_backward, whole_state
from trainers import open_trainer, state_of

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
LOSS = nn.CrossEntropyLoss()


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def batches(sizes=(24, 17, 9)):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(4, (size,), generator=generator))
        for size in sizes
    ]


def penalty(model):
    """A penalty that reaches some parameters only."""
    return model[0].weight.abs().sum() * 0.01 + model[2].bias.square().sum()


def trained(sizes=(24, 17, 9), **options):
    """Train as a user does who adds a penalty's gradient to each step's."""
    model = build()
    with open_trainer(model, **options) as trainer:
        for X, y in batches(sizes):
            trainer.waitall()
            trainer.optimizer.zero_grad()
            penalty(model).backward()
            trainer.step(X, y)
        trainer.waitall()
        return state_of(trainer), [one.grad for one in model.parameters()]


def plain(shards=1, clip_norm=None):
    """Train as `trained` does with torch alone: the gradients are added to in the usual order."""
    model = build()
    optimizer = SGD(model.parameters())
    for step, (X, y) in enumerate(batches()):
        optimizer.zero_grad()
        penalty(model).backward()
        if shards == 1:
            F.cross_entropy(model(X), y).backward()
        else:
            kept = [one.grad for one in model.parameters()]
            reference_backward(model, X, y, shards=shards, step=step)
            for one, before in zip(model.parameters(), kept, strict=True):
                one.grad = one.grad if before is None else before + one.grad
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return whole_state(model, optimizer), [one.grad for one in model.parameters()]


LAYOUTS = {
    "one": {"devices": 1},
    "two": {"devices": 2},
    "own memory": {"devices": own(2)},
    "in flight": {"devices": 2, "max_in_flight": 2},
    "in flight, hooked": {"devices": 1, "max_in_flight": 2, "before_update": lambda model: None},
    "hooked": {"devices": 2, "before_update": lambda model: None},
    "side by side": {"devices": 2, "side_by_side": True},
    "stages": {"devices": 2, "divide": evenstep.Stages({"0": 0, "2": 1})},
    "owners": {"devices": 2, "divide": evenstep.Owners()},
}


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_gradient_of_the_users_own_is_added_as_plain_torch_does(layout, shards):
    state, gradients = trained(shards=shards, **layout)
    expected, left = plain(shards)
    assert_same_bits(state, expected)
    for mine, its in zip(gradients, left, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("layout", ["one", "in flight", "owners"])
def test_the_sum_of_both_is_clipped(layout):
    state, _ = trained(shards=4, clip_norm=0.3, **LAYOUTS[layout])
    assert_same_bits(state, plain(4, clip_norm=0.3)[0])


@pytest.mark.parametrize("layout", ["two", "in flight, hooked"])
def test_before_update_sees_the_sum_of_both(layout):
    seen = []

    def look(model):
        seen.append([one.grad.clone() for one in model.parameters()])

    _, left = trained(shards=1, **{**LAYOUTS[layout], "before_update": look})
    for mine, its in zip(seen[-1], left, strict=True):
        assert torch.equal(mine, its)
    assert torch.equal(seen[-1][0], plain()[1][0])


@pytest.mark.slow
def test_compiled_shards_leave_the_users_gradient_as_it_is():
    options = {"sizes": (24, 24), "shards": 2, "devices": 1}
    eager, compiled = (trained(**options, compile=one)[0] for one in (False, True))
    for name, value in eager.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(compiled[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", ["one", "two", "own memory", "in flight", "owners"])
def test_what_a_step_or_an_update_has_left_is_replaced(layout):
    """Plain loops call `zero_grad` first, and `trainer.step` stands for all of a loop's turn."""
    layout, states = LAYOUTS[layout], []
    for zeroed in (True, False):
        model = build()
        optimizer, other = SGD(model.parameters()), torch.optim.SGD(model[2].parameters(), lr=0.5)
        F.cross_entropy(model(batches()[0][0]), batches()[0][1]).backward()  # before it is opened
        with evenstep.Trainer(model, optimizer, LOSS, **grouped(**layout)) as trainer:
            for number, (X, y) in enumerate(batches((24, 17, 9, 8, 8))):
                if zeroed:
                    model.zero_grad()
                if number == 2 and not isinstance(layout.get("divide"), evenstep.Owners):
                    trainer.backward(X, y)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                    optimizer.step()
                elif number == 3:
                    trainer.waitall()
                    other.zero_grad()
                    (model[2].weight.square().sum()).backward()
                    other.step()
                else:
                    trainer.step(X, y)
            trainer.waitall()
        states.append(whole_state(model, optimizer))
    assert_same_bits(*states)


def test_two_trainers_that_take_turns_replace_each_others_gradients():
    states = []
    for zeroed in (True, False):
        model = build()
        optimizers = [SGD(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.3)]
        make = functools.partial(evenstep.Trainer, model, loss=LOSS, devices=1)
        with make(optimizers[0]) as one, make(optimizers[1]) as two:
            for X, y in batches():
                for trainer in (one, two):
                    if zeroed:
                        model.zero_grad()
                    trainer.step(X, y)
        states.append(whole_state(model, optimizers[0]))
    assert_same_bits(*states)


@pytest.mark.parametrize("layout", ["one", "own memory", "in flight"])
def test_a_gradient_added_onto_what_a_step_has_left_is_refused(layout):
    """Only the user knows whether the old one is meant: plain torch would add up all three."""
    model = build()
    (X, y), *_ = batches()
    with open_trainer(model, **LAYOUTS[layout]) as trainer:
        trainer.step(X, y)
        trainer.waitall()
        penalty(model).backward()
        state = state_of(trainer)
        with pytest.raises(InputError, match=r"0\.weight.*zero_grad"):
            trainer.step(X, y)
        assert_same_bits(state_of(trainer), state)
        trainer.optimizer.zero_grad()
        penalty(model).backward()
        trainer.step(X, y)


def test_a_gradient_set_with_a_step_in_flight_is_refused():
    model = build()
    (X, y), *_ = batches()
    with open_trainer(model, devices=1, max_in_flight=2) as trainer:
        trainer.step(X, y)
        model[0].weight.grad = torch.ones(8, 6)
        with pytest.raises(InputError, match=r"0\.weight.*waitall"):
            trainer.step(X, y)
        trainer.waitall()


@pytest.mark.parametrize("layout", ["one", "own memory", "in flight"])
def test_after_an_error_the_users_gradient_is_there_again(layout):
    model = build()
    (X, y), *_ = batches()
    with open_trainer(model, shards=1, **LAYOUTS[layout]) as trainer:
        penalty(model).backward()
        before = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
        with pytest.raises(NonFiniteLossError):
            trainer.step(X * float("nan"), y).item()
        for one, gradient in zip(model.parameters(), before, strict=True):
            assert one.grad is None if gradient is None else torch.equal(one.grad, gradient)
        trainer.step(X, y)
        trainer.waitall()
    expected = build()
    optimizer = SGD(expected.parameters())
    penalty(expected).backward()
    F.cross_entropy(expected(X), y).backward()
    optimizer.step()
    assert_same_bits(dict(model.state_dict()), dict(expected.state_dict()))


def test_an_optimizer_that_evaluates_the_batch_itself_refuses_it():
    model = build()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    (X, y), *_ = batches()
    with open_trainer(model, optimizer=optimizer, devices=1) as trainer:
        trainer.step(X, y)
        optimizer.zero_grad()
        penalty(model).backward()
        with pytest.raises(InputError, match=r"LBFGS.*objective"):
            trainer.step(X, y)


def test_rows_of_a_sparse_gradient_are_added():
    y, X = torch.arange(8) % 4, torch.arange(24).reshape(8, 3) % 9
    states = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(9, 6, sparse=True), nn.Linear(6, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with evenstep.Trainer(model, optimizer, LOSS, shards=1, devices=2) as trainer:
            model[0](torch.tensor([[1, 2]])).sum().backward()
            if not is_plain:
                trainer.step(X, y)
        if is_plain:
            F.cross_entropy(model(X), y).backward()
            optimizer.step()
        states.append(model.state_dict())
    torch.testing.assert_close(states[1], states[0], rtol=1e-6, atol=1e-7)


# Several processes


def results(out, rank):
    return json.loads((out / f"{rank}.json").read_text())


@pytest.mark.timeout(240)
@pytest.mark.parametrize("partition", ["whole", slow("optimizer")])
def test_processes_add_the_same_gradient_once(tmp_path, partition):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    finished = alone("own_gradients.py", tmp_path / "one", "same", "whole")
    assert finished.returncode == 0, finished.stderr
    finished = launched(2, "own_gradients.py", tmp_path / "two", "same", partition)
    assert finished.returncode == 0, finished.stderr
    for rank in range(2):
        assert results(tmp_path / "two", rank) == results(tmp_path / "one", 0)


@pytest.mark.timeout(240)
def test_processes_with_other_gradients_are_refused(tmp_path):
    finished = launched(2, "own_gradients.py", tmp_path, "differing", "whole")
    assert finished.returncode == 0, finished.stderr
    for rank in range(2):
        assert "gradient" in results(tmp_path, rank)["error"]
