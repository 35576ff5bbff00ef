"""Optimizers that multiply: gradients and state at any address give the bits of aligned ones."""

import pytest
import torch
from torch import nn

import evenstep
from places import by_address, in_array, odd_copy
from reference import assert_same_bits, plain_training, whole_state
from trainers import open_trainer, take_steps

OPTIONS = {"shards": 1, "memory_format": "contiguous", "devices": 1}


class Whitened(torch.optim.Optimizer):
    """Multiplies gradients with a running second moment of theirs, as Shampoo's family does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                state.setdefault("moment", torch.eye(one.shape[1]))
                state["moment"].add_(by_address(one.grad.T.contiguous(), one.grad.T))
                one.add_(by_address(one.grad, state["moment"]), alpha=-group["lr"])


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 9, bias=False), nn.Tanh(), nn.Linear(9, 5, bias=False))


def batches():
    torch.manual_seed(1)
    return [(torch.randn(12, 13), torch.randint(0, 5, (12,))) for _ in range(3)]


def plain(before_step=lambda model: None, state=None):
    model = build()
    optimizer = Whitened(model.parameters())
    if state is not None:
        optimizer.load_state_dict(state)
    plain_training(model, optimizer, batches(), before_update=before_step)
    return whole_state(model, optimizer)


def train(load=lambda optimizer: None, load_inside=lambda optimizer: None, **options):
    model = build()
    optimizer = Whitened(model.parameters())
    load(optimizer)
    with open_trainer(model, optimizer=optimizer, **{**OPTIONS, **options}) as trainer:
        load_inside(optimizer)
        for X, y in batches():
            trainer.step(X, y)
    return whole_state(model, optimizer)


def at_an_odd_address(model):
    for one in model.parameters():
        one.grad = odd_copy(one.grad * 2)
        kept.append(one.grad)  # whoever holds it


def double(model):
    for one in model.parameters():
        one.grad = one.grad * 2


kept = []


@pytest.mark.parametrize("in_flight", [1, 2])
def test_gradients_that_before_update_sets(in_flight):
    expected = plain(double)
    found = train(before_update=at_an_odd_address, max_in_flight=in_flight)
    assert_same_bits(found, expected)
    kept.clear()


def test_gradients_that_a_hook_returns():
    def hooked(model):
        for one in model.parameters():
            one.register_hook(lambda gradient: odd_copy(gradient * 2))

    model = build()
    hooked(model)
    trainer = open_trainer(model, optimizer=Whitened(model.parameters()), **OPTIONS)
    assert_same_bits(take_steps(trainer, batches()), plain(double))


def state_dict(place):
    torch.manual_seed(2)
    model = build()
    optimizer = Whitened(model.parameters())
    for one in model.parameters():
        root = torch.randn(one.shape[1], one.shape[1])
        optimizer.state[one]["moment"] = place(root @ root.T)
    return optimizer.state_dict()


@pytest.mark.parametrize("when", ["load", "load_inside"])
def test_a_state_at_an_odd_address_that_is_loaded(when):
    expected = plain(state=state_dict(torch.clone))
    found = train(**{when: lambda optimizer: optimizer.load_state_dict(state_dict(odd_copy))})
    assert_same_bits(found, expected)


@pytest.mark.parametrize("when", ["load", "load_inside"])
def test_a_state_whose_memory_is_not_torchs_is_refused_for_optimizers_that_may_multiply(when):
    with pytest.raises(evenstep.errors.ContractError, match=r"Whitened for 0\.weight .*64 bytes"):
        train(**{when: lambda optimizer: optimizer.load_state_dict(state_dict(in_array))})


def test_torchs_own_optimizers_that_compute_each_element_by_itself_take_any_state():
    def trained(place):
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for one in model.parameters():
            optimizer.state[one] = {
                "step": torch.tensor(3.0),
                "exp_avg": place(torch.ones(one.shape)),
                "exp_avg_sq": place(torch.ones(one.shape)),
            }
        return take_steps(open_trainer(model, optimizer=optimizer, **OPTIONS), batches())

    assert_same_bits(trained(in_array), trained(torch.clone))
