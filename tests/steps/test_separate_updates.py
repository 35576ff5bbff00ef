"""Which optimizers update each tensor by itself is tried out, and the others are refused."""

import copy

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import InputError, ModelError
from evenstep.steps.owners.separate_updates import refuse_coupled
from optimizers import embedding
from owned_optimizers import (
    COUPLED,
    OPTIMIZERS,
    OWN_LISTS,
    ByDistance,
    CountsGradients,
    DecaysAll,
    KeepsElsewhere,
    Lion,
    OwnList,
    model_of,
)
from reference import assert_same_bits, whole_state
from trainers import open_trainer
from zoo import build, make_batches


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_single_tensors_is_left_as_it_was(name):
    model = model_of(name)
    optimizer = OPTIMIZERS[name](model.parameters())
    before = copy.deepcopy(whole_state(model, optimizer))
    drawn = torch.random.get_rng_state()
    refuse_coupled(optimizer)
    assert_same_bits(whole_state(model, optimizer), before)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_also_with_state_and_a_scheduler_that_begins_at_zero():
    model = build("convolution")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), devices=1) as trainer:
        trainer.step(*make_batches((16,))[0])
    refuse_coupled(optimizer)


def _name(make):
    return "Lamb, clips at {max_grad_norm}".format(**make.keywords) if hasattr(make, "func") else (
        make.__name__
    )  # fmt: skip


@pytest.mark.parametrize("make", COUPLED, ids=_name)
@pytest.mark.parametrize("grouped", ["together", "one a group"])
def test_coupled_tensors_are_refused(make, grouped):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))  # more than are tried out
    apart = [{"params": [one]} for one in model.parameters()]
    optimizer = make(model.parameters() if grouped == "together" else apart)
    drawn = torch.random.get_rng_state()
    name = type(optimizer).__name__
    with pytest.raises(ModelError, match=f"{name} updates a tensor with other bits"):
        refuse_coupled(optimizer)
    assert torch.equal(torch.random.get_rng_state(), drawn)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (DecaysAll, "DecaysAll changes parameters that have no gradient"),
        (KeepsElsewhere, "KeepsElsewhere keeps state in attributes of its own"),
        (CountsGradients, "CountsGradients changes the settings of a group only"),
    ],
)
def test_what_follows_other_gradients_is_refused(make, message):
    with pytest.raises(ModelError, match=message):
        refuse_coupled(make(build("convolution").parameters()))


@pytest.mark.parametrize("hold", OWN_LISTS.values(), ids=OWN_LISTS)
def test_an_optimizer_with_parameters_of_its_own_is_refused(hold):
    optimizer = OwnList(build("convolution").parameters(), hold)
    with pytest.raises(ModelError, match=r"OwnList\.mine holds parameters outside of"):
        refuse_coupled(optimizer)


def test_coupling_is_seen_although_the_learning_rate_begins_at_zero():
    optimizer = ByDistance(build("convolution").parameters())
    optimizer.param_groups[0]["lr"] = 0
    with pytest.raises(ModelError, match="other bits"):
        refuse_coupled(optimizer)


def owned(model, optimizer, **options):
    return open_trainer(model, optimizer=optimizer, devices=1, divide=evenstep.Owners(), **options)


class Outer(torch.optim.SGD):
    def __init__(self, parameters):
        parameters = [*parameters]
        super().__init__(parameters, lr=0.1)
        self.inner = torch.optim.Adam(parameters)


def hooked(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(lambda *given: None)
    return optimizer


def patched(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.step = lambda: None
    return optimizer


class Fails(Lion):
    def step(self, closure=None):
        raise NotImplementedError("not today")


REFUSED = [
    (torch.optim.LBFGS, "LBFGS takes all parameters as one vector"),
    (lambda p: torch.optim.Adam(p, fused=True), "Adam has fused=True"),
    (Outer, r"Outer\.inner is an optimizer inside another one"),
    (hooked, "SGD has hooks on its step"),
    (patched, r"SGD\.step was replaced"),
    (Fails, "Fails could not be tried out .*not today"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_what_cannot_be_split_is_refused_by_name(make, message, max_in_flight):
    model = build("convolution")
    optimizer = make(model.parameters())
    if max_in_flight == 2 and make in (Outer, patched):
        message = "max_in_flight"  # refused there already
    with pytest.raises(ModelError, match=message):
        owned(model, optimizer, max_in_flight=max_in_flight)


def test_layers_with_sparse_gradients_are_refused_by_name():
    model = embedding()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ModelError, match=r"table\.weight belongs to a layer with sparse=True"):
        owned(model, optimizer)


def test_backward_is_refused_by_name():
    model = build("convolution")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with owned(model, optimizer) as trainer:
        with pytest.raises(InputError, match=r"trainer\.backward leaves the update to you"):
            trainer.backward(*make_batches((16,))[0])
        trainer.step(*make_batches((16,))[0])
