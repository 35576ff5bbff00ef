"""A model called by the fastest method that gives its outputs."""

import logging
import math

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import ExportError, ModelError
from evenstep.inference import fast_call
from reference import plain_outputs


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(512, 256),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Linear(128, 2),
    )


@pytest.fixture
def without_compiler(monkeypatch):
    makers = {"traced": fast_call._traced, "unrolled": fast_call._unrolled}
    monkeypatch.setattr(fast_call, "_MAKERS", makers)


@pytest.mark.usefixtures("without_compiler")
def test_it_gives_the_models_outputs_and_is_never_slower_than_it():
    model, x = net(), torch.randn(1, 512)
    called = evenstep.hybridize(model, x)
    assert model.training
    assert {method.name for method in called.methods} == {"eager", "traced", "unrolled"}
    assert called.method.call_us == min(method.call_us for method in called.methods)
    for inputs in (x, torch.randn(1, 512)):
        torch.testing.assert_close(called(inputs), plain_outputs(model, inputs))
    for inputs in (x, x.clone().requires_grad_()):
        assert not called(inputs).requires_grad


@pytest.mark.usefixtures("without_compiler")
def test_other_inputs_than_the_examples_go_to_the_model_itself():
    model = net()
    called = evenstep.hybridize(model, torch.randn(1, 512))
    for size in (2, 5):
        x = torch.randn(size, 512)
        assert called(x).equal(plain_outputs(model, x))
    assert model.training


def test_inputs_that_lie_otherwise_in_memory_go_to_the_model_itself(monkeypatch):
    """Compiled code is specialised for strides, and reads wrong numbers with other ones."""

    def make(net, inputs):
        return lambda x: net(torch.as_strided(x, inputs[0].shape, inputs[0].stride()))

    monkeypatch.setattr(fast_call, "_MAKERS", {"specialised": make})
    monkeypatch.setattr(fast_call, "_times", lambda calls, _: {n: -len(n) for n in calls})
    model = nn.Linear(3, 2)
    called = evenstep.hybridize(model, torch.randn(4, 3))
    assert called.method.name == "specialised"
    for x in (torch.randn(4, 3), torch.randn(3, 4).t()):
        assert called(x).equal(plain_outputs(model, x))


@pytest.mark.slow
def test_compiled_ahead_it_agrees_too():
    model, x = net(), torch.randn(1, 512)
    called = evenstep.hybridize(model, x)
    (compiled,) = [method for method in called.methods if method.name == "compiled"]
    assert compiled.why_not == ""
    assert compiled.max_difference < 1e-5
    for inputs in (x, torch.randn(1, 1024)[:, ::2]):
        torch.testing.assert_close(called(inputs), plain_outputs(model, inputs))


class BranchesOnValues(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else -x


def test_a_model_that_is_no_program_stays_as_it_is_and_says_why(caplog):
    with caplog.at_level(logging.INFO, "evenstep"):
        called = evenstep.hybridize(BranchesOnValues(), torch.ones(2, 3))
    assert called.method.name == "eager"
    assert called(-torch.ones(2, 3)).equal(torch.ones(2, 3))
    others = [method for method in called.methods if method.name != "eager"]
    assert len(others) == 3
    for other in others:
        assert "can't be exported" in other.why_not or "control flow" in other.why_not
        assert math.isnan(other.call_us)
    assert "BranchesOnValues: eager calls are used" in caplog.text


def test_a_method_that_gives_other_outputs_is_not_taken(monkeypatch):
    monkeypatch.setattr(fast_call, "_MAKERS", {"wrong": lambda net, inputs: lambda x: net(x) + 0.1})
    called = evenstep.hybridize(nn.Linear(3, 2), torch.ones(1, 3))
    assert called.method.name == "eager"
    assert called.methods[1].why_not == "its outputs differ by 1.0e-01"


def test_a_method_that_is_slower_is_not_taken(monkeypatch):
    def slow(net, inputs):
        def call(x):
            for _ in range(50):
                result = net(x)
            return result

        return call

    monkeypatch.setattr(fast_call, "_MAKERS", {"slow": slow})
    called = evenstep.hybridize(nn.Linear(64, 64), torch.ones(1, 64))
    assert [method.name for method in called.methods] == ["eager", "slow"]


@pytest.mark.parametrize(
    ("example", "error"), [(torch.ones(1, 7), ModelError), ([1.0], ExportError), ((), ExportError)]
)
def test_a_bad_example_is_refused(example, error):
    with pytest.raises(error):
        evenstep.hybridize(nn.Linear(3, 2), example)


class Counts(nn.Module):
    """Counts its calls in a buffer, and draws a number."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.weight + self.calls + torch.rand(3)


@pytest.mark.usefixtures("without_compiler")
def test_buffers_and_the_generator_stay_as_they_were():
    model, before = Counts(), torch.get_rng_state()
    buffer = model.calls
    evenstep.hybridize(model, torch.ones(2, 3))
    assert model.calls is buffer
    assert buffer == 0
    assert torch.get_rng_state().equal(before)
