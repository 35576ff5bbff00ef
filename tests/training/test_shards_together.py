"""Shards that are computed at once give what each gives by itself."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

import evenstep
from evenstep.arithmetic.together import region, shards_of
from evenstep.models import lenet
from evenstep.shard import together
from reference import assert_same_bits

PORTABLE = evenstep.Experiment(arithmetic="portable")


class Reader(nn.Module):
    """A recurrent layer written by hand, with a tensor that it fills."""

    def __init__(self):
        super().__init__()
        self.of_input, self.of_state = nn.Linear(4, 20), nn.Linear(5, 20)
        self.head = nn.Linear(5, 10)

    def forward(self, x):
        state = memory = x.new_zeros(len(x), 5)
        seen = torch.zeros(len(x), x.shape[1], 5)
        for step in range(x.shape[1]):
            gates = self.of_input(x[:, step]) + self.of_state(state)
            forget, add, show, new = gates.chunk(4, 1)
            memory = torch.sigmoid(forget) * memory + torch.sigmoid(add) * torch.tanh(new)
            state = torch.sigmoid(show) * torch.tanh(memory)
            seen[:, step] = state
        return self.head(functional.dropout(seen.mean(1), 0.2))


def layers(*more):
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), *more, nn.Linear(8, 10))


MODELS = {
    "perceptron": (layers, (24, 6)),
    "LeNet": (lenet, (24, 1, 28, 28)),
    "recurrent": (Reader, (24, 3, 4)),
    "deep": (lambda: layers(*[nn.Linear(8, 8), nn.Tanh()] * 20), (24, 6)),
    "batch norm": (lambda: layers(nn.BatchNorm1d(8), nn.Dropout(0.3)), (24, 6)),
    "layer norm": (lambda: layers(nn.LayerNorm(8), nn.GELU()), (24, 6)),
    "uneven shards": (layers, (30, 6)),
}


@pytest.fixture
def at_once(monkeypatch):
    """How many shards were computed at once, call by call."""
    counts, compute = [], together._at_once

    def counted(replica, works, *given):
        found = compute(replica, works, *given)
        counts.append(len(works))
        return found

    monkeypatch.setattr(together, "_at_once", counted)
    return counts


def train(model, shape, *, devices=1, steps=4, **given):
    given = given or {"loss": functional.cross_entropy}
    with evenstep.portable(seed=1):
        torch.manual_seed(0)
        model, examples = model(), torch.randn(steps, *shape)
        labels = torch.randint(10, (steps, shape[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    with evenstep.Trainer(
        model, optimizer, devices=devices, shards=8, experiment=PORTABLE, **given
    ) as trainer:
        for x, y in zip(examples, labels, strict=True):
            losses.append(float(trainer.step(x, y)))
    return model.state_dict(), losses


def by_themselves(monkeypatch, *given, **more):
    with monkeypatch.context() as patch:
        patch.setattr(together.Together, "runs", lambda *_: {})
        return train(*given, **more)


@functools.cache
def expected_of(name):
    with pytest.MonkeyPatch.context() as patch:
        return by_themselves(patch, *MODELS[name])


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_are_those_of_each_shard_by_itself(name, devices, at_once):
    state, losses = train(*MODELS[name], devices=devices)
    if devices == 1:  # others may get single shards
        assert len(at_once) >= 3
    at_once.clear()
    expected, own_losses = expected_of(name)
    assert not at_once
    assert_same_bits(state, expected)
    assert losses == own_losses


def test_outputs_are_those_of_each_shard(at_once, monkeypatch):
    def objective(model, x, y):
        scores = model(x)
        loss = functional.cross_entropy(scores, y, reduction="sum")
        hits = (scores.argmax(1) == y).sum()
        return loss, len(y), {"hits": (hits, len(y)), "scores": scores, "one": 1}

    seen = []
    step = evenstep.Trainer.step

    def noted(trainer, *given):
        loss = step(trainer, *given)
        seen.append(loss.outputs)
        return loss

    monkeypatch.setattr(evenstep.Trainer, "step", noted)
    train(*MODELS["perceptron"], objective=objective)
    assert at_once
    together_seen, seen[:] = [*seen], []
    by_themselves(monkeypatch, *MODELS["perceptron"], objective=objective)
    for one, other in zip(together_seen, seen, strict=True):
        assert one["hits"] == other["hits"]
        assert one["one"] == other["one"] == 8
        assert torch.equal(one["scores"], other["scores"])


class Counted(nn.Module):
    """Reads a number, and does nothing with it that shows."""

    def __init__(self, read):
        super().__init__()
        self.read, self.layer = read, nn.Linear(6, 10)

    def forward(self, x):
        return self.layer(x) + 0 * self.read(x)


READS = {
    "item": lambda x: x[0, 0].item(),
    "numpy": lambda x: float(x.numpy()[0, 0]),
    "tolist": lambda x: x.tolist()[0][0],
    "selected": lambda x: float(len(x[x[:, 0] > 0])),
    "random state": lambda _: float(torch.get_rng_state()[0]),
}


@pytest.mark.parametrize("read", READS)
def test_a_model_that_reads_numbers_computes_each_shard_by_itself(read, at_once, monkeypatch):
    given = (lambda: Counted(READS[read]), (24, 6))
    state, losses = train(*given)
    assert not at_once
    expected, own_losses = by_themselves(monkeypatch, *given)
    assert_same_bits(state, expected)
    assert losses == own_losses


def test_a_wrong_rule_is_found_before_it_matters(at_once, monkeypatch):
    def wrong(place, operation, x):
        return place.of_all(torch.relu(shards_of(x, place.shards)) * 1.0000001)

    monkeypatch.setattr(region._form(torch.ops.aten.relu.default), "rule", wrong)
    state, losses = train(*MODELS["perceptron"])
    assert len(at_once) == 1  # and compared
    expected, own_losses = by_themselves(monkeypatch, *MODELS["perceptron"])
    assert_same_bits(state, expected)
    assert losses == own_losses


def test_a_label_that_is_out_of_range_is_reported_as_usual():
    def objective(model, x, y):
        return functional.cross_entropy(model(x), y + 9 * (y == 7), reduction="sum"), len(y)

    with pytest.raises(IndexError, match="out of bounds"):
        train(*MODELS["perceptron"], objective=objective)


def test_large_models_compute_each_shard_by_itself(at_once, monkeypatch):
    monkeypatch.setattr(together, "_LARGEST_BYTES", 4 * 8 * 6)
    train(*MODELS["perceptron"])
    assert not at_once
