"""What breaks the contract of a step is refused by name in the first step."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from checked import (
    CLASSES,
    Momentum,
    everywhere,
    net,
    train,
    write_in_place,
)
from evenstep.errors import ContractError
from taking_turns import in_turn


class Stateful(nn.Module):
    """Goes on with a state that the shard before has left in an attribute."""

    def __init__(self):
        super().__init__()
        self.cell = nn.RNNCell(6, CLASSES)
        self.hidden = None

    def forward(self, x):
        output = self.cell(x, None if self.hidden is None else self.hidden[: len(x)])
        self.hidden = output.detach()
        return output


def write_past_the_counter(key, query):
    key.data.lerp_(query.data, 0.1)


def write_another_storage(key, query):
    key.data = key.data * 0.9 + query.data * 0.1


# ---- repeat


@everywhere
def test_state_in_an_attribute_is_refused_by_its_name(devices):
    with pytest.raises(ContractError, match=r"changed model\.hidden"):
        train(Stateful(), devices=devices)


@in_turn("write", [write_in_place, write_past_the_counter, write_another_storage])
def test_parameters_written_in_forward_are_refused_by_their_name(write, devices):
    with pytest.raises(ContractError, match=r"key\.weight was written in forward.*after_update"):
        train(Momentum(write), devices=devices)


def test_a_memory_outside_the_model_is_refused():
    seen = []

    def objective(model, X, y):
        output = model(X)
        seen.append(output.detach().mean())
        return F.cross_entropy(output * sum(seen), y, reduction="sum"), len(y)

    with pytest.raises(ContractError, match=r"two results: its total is .* a memory bank"):
        train(net(), objective)


def test_a_gradient_that_alone_differs_is_named():
    calls = []

    class Stretch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            calls.append(None)
            return gradient * len(calls)

    def objective(model, X, y):
        return F.cross_entropy(Stretch.apply(model(X)), y, reduction="sum"), len(y)

    with pytest.raises(ContractError, match=r"the gradient of 0\.weight differs the second time"):
        train(net(), objective)


OWN = {"torch": torch.Generator(), "numpy": np.random.default_rng(0), "python": random.Random(0)}
GENERATORS = {
    "numpy.random": (lambda: np.random.rand(), r"draws from numpy\.random"),
    "random": (lambda: random.random(), r"draws from Python's random module"),
    "a torch.Generator": (
        lambda: torch.rand((), generator=OWN["torch"]),
        r"draws from a torch\.Generator",
    ),
    "a numpy Generator": (lambda: OWN["numpy"].random(), r"draws from a numpy\.random\.Generator"),
    "a random.Random": (lambda: OWN["python"].random(), r"draws from a random\.Random"),
}


@in_turn("name", GENERATORS)
def test_a_generator_besides_torchs_is_refused_by_file_and_line(name, devices):
    draw, line = GENERATORS[name]

    def objective(model, X, y):
        return F.cross_entropy(model(X) * float(draw()), y, reduction="sum"), len(y)

    with pytest.raises(ContractError, match=rf"{line}.*test_self_check\.py, line \d+"):
        train(net(), objective, devices=devices)


def test_a_generator_that_the_objective_seeds_itself_is_fine():
    def objective(model, X, y):
        scale = np.random.default_rng(0).random() + random.Random(0).random()
        noise = torch.rand(len(X), 1, generator=torch.Generator().manual_seed(1))
        return F.cross_entropy(model(X * noise) * scale, y, reduction="sum"), len(y)

    train(net(), objective, separable=False)


# ---- what learns


@everywhere
def test_a_second_module_in_the_closure_is_refused_by_its_parameters(devices):
    head = nn.Linear(CLASSES, CLASSES)

    def objective(model, X, y):
        return F.cross_entropy(head(model(X)), y, reduction="sum"), len(y)

    with pytest.raises(ContractError, match=r"the parameter weight of a Linear outside the model"):
        train(net(), objective, devices=devices)
    assert head.weight.grad is None


def test_a_loss_with_parameters_behind_a_lambda_is_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output, y):
            return self.scale * F.cross_entropy(output, y)

    scaled = Scaled()
    with pytest.raises(ContractError, match=r"the parameter scale of a Scaled outside the model"):
        train(net(), loss=lambda output, y: scaled(output, y))


def test_a_tensor_that_requires_a_gradient_is_refused_by_its_shape():
    offset = torch.zeros(CLASSES, requires_grad=True)
    with pytest.raises(ContractError, match=r"a tensor of shape \(4,\)"):
        train(net(), lambda m, X, y: (F.cross_entropy(m(X) + offset, y, reduction="sum"), len(y)))


def test_a_frozen_teacher_and_a_penalty_on_the_inputs_gradient_are_fine():
    teacher = nn.Linear(6, CLASSES)

    def objective(model, X, y):
        with torch.no_grad():
            target = teacher(X)
        X = X.clone().requires_grad_()
        output = model(X)
        (slope,) = torch.autograd.grad(output.sum(), X, create_graph=True)
        return (output - target).square().sum() + slope.square().sum(), len(y)

    _, report = train(net(), objective)
    assert report.unjudged == ""


# ---- addresses


class RoundsByPage(torch.autograd.Function):
    """A product of one's own that rounds by where its weight lies in a page of memory."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        first = weight.data_ptr() // 64 % 64 % x.shape[1]
        return x[:, :first] @ weight[:, :first].T + x[:, first:] @ weight[:, first:].T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ x


class Paged(nn.Module):
    def __init__(self, *, is_buffer=False):
        super().__init__()
        weight = torch.randn(6, 6)
        if is_buffer:
            self.register_buffer("weight", weight)
        else:
            self.weight = nn.Parameter(weight)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(RoundsByPage.apply(x, self.weight)))


@in_turn("shards_and_kind", [(1, "parameter"), (4, "parameter"), (4, "buffer"), (1, "buffer")])
def test_an_operation_that_rounds_by_the_address_of_a_weight_is_refused(shards_and_kind, devices):
    shards, kind = shards_and_kind
    model = nn.Sequential(net(), nn.Linear(CLASSES, 6), Paged(is_buffer=kind == "buffer"))
    with pytest.raises(ContractError, match="other addresses in memory"):
        train(model, devices=devices, shards=shards)
