"""Attributes of the model that hold tensors with a graph from outside of the step."""

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import ContractError
from grouping import grouped
from layouts import own
from reference import assert_same_bits, whole_state
from zoo import make_batches

LAYOUTS = {
    "one": {"devices": 1},
    "two": {"devices": 2},
    "own memory": {"devices": own(2)},
    "in flight": {"devices": 1, "max_in_flight": 2},
    "two in flight": {"devices": 2, "max_in_flight": 2},
    "side by side": {"devices": 2, "side_by_side": True},
    "stages": {"devices": 2, "divide": evenstep.Stages({"a": 0, "b": 1})},
}
on_layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


class Scaled(nn.Module):
    """Reads what its attributes hold; `seen` is written by each forward pass and never read."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(36, 8), nn.Linear(8, 5)
        self.w, self.held, self.rows, self.seen = None, {"w": None}, [None], None

    def forward(self, x):
        x = self.a(x.flatten(1))
        for one in (self.w, self.held["w"], self.rows[0]):
            x = x if one is None else x * (1 + one)
        self.seen = x.tanh()
        return self.b(self.seen)


def to_layer(model, value):
    model.a.register_forward_hook(lambda module, inputs, output: output * module.w)
    model.a.w = value


def trained(change, at=2, model=None, **layout):
    model = Scaled() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **grouped(**layout)) as trainer:
        for number, batch in enumerate(make_batches((24,) * 4)):
            if number == at:
                change(model)
            trainer.step(*batch)
        trainer.waitall()
    return whole_state(model, optimizer)


PLACES = {
    "w": lambda model, value: setattr(model, "w", value),
    "a.w": to_layer,
    "held": lambda model, value: model.held.update(w=value),
    "rows": lambda model, value: model.rows.__setitem__(0, value),
}


@on_layouts
@pytest.mark.parametrize("name", PLACES)
def test_a_tensor_with_a_graph_set_between_steps_is_refused(layout, name):
    shards = 1 if name in ("w", "held") else 4

    def change(model):
        PLACES[name](model, model.a.bias * 2)

    with pytest.raises(ContractError, match=rf"\b{name}\b(?s:.*)forward(?s:.*)detach\(\)"):
        trained(change, shards=shards, **layout)


@on_layouts
@pytest.mark.parametrize("at", [0, "before"])
def test_it_is_refused_in_the_first_step_too(layout, at):
    model = Scaled()

    def change(model):
        model.w = model.a.bias * 2

    if at == "before":
        change(model)
    with pytest.raises(ContractError, match=r"\bw\b(?s:.*)forward(?s:.*)detach\(\)"):
        trained(change, at, model, **layout)


@on_layouts
def test_one_that_is_set_again_in_each_turn_is_refused(layout):
    """On one device with one shard, plain torch's way would have worked."""
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.CrossEntropyLoss()
    (batch,) = make_batches((24,))
    with evenstep.Trainer(model, optimizer, loss, **grouped(**{"shards": 1, **layout})) as trainer:
        for number in range(3):
            model.w = model.a.bias * 2 if number else None
            if number:
                with pytest.raises(ContractError, match="detach"):
                    trainer.step(*batch).item()
            else:
                trainer.step(*batch).item()
            assert model.w is None or model.w.grad_fn is not None
        model.w = None
        trainer.step(*batch).item()


@on_layouts
def test_its_value_may_be_set(layout):
    def change(model):
        model.w = (model.a.bias * 2).detach()

    layout = {"shards": 4, **layout}
    if "max_in_flight" in layout:
        waits = trained(lambda model: setattr(model, "w", torch.ones(8)), **layout)
        expected = trained(lambda model: setattr(model, "w", torch.ones(8)), shards=4, devices=1)
        assert_same_bits(waits, expected)
    else:
        assert_same_bits(trained(change, **layout), trained(change, shards=4, devices=1))


@on_layouts
def test_results_that_forward_writes_before_it_reads_them_are_no_matter(layout):
    """A forward pass of the user's own between two steps leaves one, on the user's module."""
    X = torch.ones(3, 36)
    expected = trained(lambda model: None, shards=4, devices=1)

    def change(model):
        with torch.random.fork_rng():
            model(X)
        model.rows.append(model.seen)

    assert_same_bits(trained(change, shards=4, **layout), expected)
    model = Scaled()
    model(X)
    seen = model.seen
    assert_same_bits(trained(change, model=model, shards=4, **layout), expected)
    assert len(model.rows) == 2
    assert model.rows[1].grad_fn is not None
    assert model.seen is not seen or "max_in_flight" in layout or "divide" in layout
    assert model.seen.grad_fn is not None


@on_layouts
def test_an_evaluation_refuses_it_too(layout):
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (X, y), *_ = make_batches((24,))
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **grouped(**layout)) as trainer:
        trainer.predict([(X, y)])
        value = model.w = model.a.bias * 2
        with pytest.raises(ContractError, match=r"\bw\b"):
            trainer.predict([(X, y)])
        assert model.w is value
