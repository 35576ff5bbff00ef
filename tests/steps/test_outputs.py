"""What an objective returns besides its loss: the same on any devices, put together by its kind."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.errors import ModelError
from grouping import grouped
from layouts import own
from trainers import LAYOUTS, sgd
from zoo import make_batches

BATCHES = make_batches((24, 17, 3))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 5))


def objective(model, X, y):
    hidden = model[:3](X)
    scores = model[3](hidden)
    loss = F.cross_entropy(scores, y, reduction="sum")
    right = (scores.argmax(1) == y).sum()
    outputs = {
        "accuracy": (right, len(y)),
        "norm": (hidden.square().sum(0), len(y)),
        "right": right,
        "examples": len(y),
        "hidden": hidden,
    }
    return loss, len(y), outputs


def trained(devices, outputs_of=objective, **options):
    """Return the outputs of each step."""
    model = network()
    with evenstep.Trainer(
        model, sgd(model), **grouped(objective=outputs_of, devices=devices, **options)
    ) as trainer:
        return [dict(loss.outputs) for loss in [trainer.step(X, y) for X, y in BATCHES]]


def assert_same_outputs(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[name])), name


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("devices", LAYOUTS, ids=str)
def test_on_every_layout(devices, in_flight):
    assert_same_outputs(trained(devices, max_in_flight=in_flight), trained(1))


@pytest.mark.parametrize("shards", [1, 8])
def test_each_kind_is_put_together(shards):
    model = network()
    ((X, y), *_) = BATCHES
    _, _, expected = objective(model, X, y)
    found, *_ = trained(2, shards=shards)
    assert found["accuracy"] == float(expected["accuracy"][0]) / len(y)
    assert found["right"] == float(expected["right"])
    assert found["examples"] == len(y)
    torch.testing.assert_close(found["norm"], expected["norm"][0] / len(y))
    torch.testing.assert_close(found["hidden"], expected["hidden"])
    assert not found["hidden"].requires_grad


def test_rows_of_a_step_go_into_the_next():
    """A recurrent state: rows out, rows in."""

    def recurrent(model, X, state):
        state = torch.tanh(model(torch.cat([X, state], 1)))
        return state.square().sum(), len(X), {"state": state}

    inputs = torch.randn(3, 20, 4, generator=torch.Generator().manual_seed(0))
    results = []
    for devices in (1, 3, own(2)):
        torch.manual_seed(0)
        model, state = nn.Linear(10, 6), torch.zeros(20, 6)
        with evenstep.Trainer(model, sgd(model), objective=recurrent, devices=devices) as trainer:
            for X in inputs:
                state = trainer.step(X, state).outputs["state"]
            results.append((trainer.fingerprint(), state.tolist()))
    assert results[0] == results[1] == results[2]


def test_rows_lie_along_the_batch_dimension():
    def time_first(model, X):
        output = model(X)
        return output.square().sum(), X.shape[1], {"output": output}

    X, model = torch.randn(7, 20, 4), nn.Linear(4, 3)
    expected = model(X)
    with evenstep.Trainer(
        model,
        sgd(model),
        objective=time_first,
        devices=2,
        experiment=evenstep.Experiment(batch_dim=1),
    ) as trainer:
        found = trainer.step(X).outputs["output"]
    torch.testing.assert_close(found, expected)


def test_rows_that_may_lie_along_two_dimensions_are_refused():
    def with_state(model, X):
        return model(X).mean(), {"state": torch.zeros(2, X.size(1), 3)}  # two layers

    model = nn.Linear(4, 3)
    said = "the output 'state', of shape .2, 2, 3., may lie along dimension 1 or 0: permute its"
    with (
        evenstep.Trainer(
            model,
            sgd(model),
            objective=with_state,
            shards=4,
            experiment=evenstep.Experiment(batch_dim=1),
        ) as trainer,
        pytest.raises(ModelError, match=said),
    ):
        trainer.step(torch.randn(5, 8, 4))


def test_outputs_do_not_change_with_what_they_were_taken_from():
    def weights(model, X, y):
        loss = F.cross_entropy(model(X), y, reduction="sum")
        return loss, len(y), {"bias": (model[3].bias, 1)}

    model = network()
    before = model[3].bias.detach().clone()
    with evenstep.Trainer(model, sgd(model), objective=weights, devices=1, shards=1) as trainer:
        found = trainer.step(*BATCHES[0]).outputs["bias"]
    assert torch.equal(found, before)
    assert not torch.equal(model[3].bias, before)


def test_without_outputs_there_are_none():
    model = network()
    with evenstep.Trainer(model, sgd(model), nn.CrossEntropyLoss(), devices=2) as trainer:
        assert trainer.step(*BATCHES[0]).outputs == {}


def test_a_compiled_training_with_outputs_is_eager():
    assert_same_outputs(trained(2, compile=True), trained(1))


WRONG = {
    "no dict": (lambda n, h: [h], "a dict is needed"),
    "no number": (lambda n, h: {"a": "text"}, r"'text' as the output 'a'"),
    "a list": (lambda n, h: {"a": h.sum(1).tolist()}, r"a list, .* torch.tensor\(...\)"),
    "a triple": (lambda n, h: {"a": (1, 2, 3)}, "a pair"),
    "no rows": (lambda n, h: {"a": h[:1]}, r"the output 'a' for 3 examples is of shape \(1, 5\)"),
    "other names": (lambda n, h: {"a" if n > 2 else "b": 1}, "outputs 'b' for shard 1, but 'a'"),
    "other kinds": (lambda n, h: {"a": 1 if n > 2 else (1, 1)}, "a number and a pair"),
    "other shapes": (lambda n, h: {"a": (h[:, : n], 1)}, r"of the shapes \(2, 2\) and \(3, 3\)"),
    "none": (None, "None"),
}  # fmt: skip


@pytest.mark.parametrize(("outputs_of", "said"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("devices", [1, 2])
def test_wrong_outputs_are_refused_and_the_step_is_not_taken(devices, outputs_of, said):
    def wrong(model, X, y):
        scores = model(X)
        loss = F.cross_entropy(scores, y, reduction="sum")
        return (loss, len(y), outputs_of(len(y), scores)) if outputs_of else None

    model = network()
    with evenstep.Trainer(model, sgd(model), objective=wrong, devices=devices) as trainer:
        before = trainer.fingerprint()
        with pytest.raises(ModelError, match=said):
            trainer.step(BATCHES[1][0], BATCHES[1][1])
        assert trainer.fingerprint() == before
        assert trainer.steps_done == 0


@pytest.mark.parametrize("devices", [1, 2])
def test_a_list_is_no_pair_when_shards_have_two_examples(devices):
    def listed(model, X, y):
        scores = model(X)
        losses = F.cross_entropy(scores, y, reduction="none")
        return losses.sum(), len(y), {"losses": losses.tolist()}

    model = network()
    with evenstep.Trainer(
        model, sgd(model), objective=listed, devices=devices, shards=4
    ) as trainer:
        said = r"a list, \[.*\] as the output 'losses': a row for each example is torch.tensor"
        with pytest.raises(ModelError, match=said):
            trainer.step(BATCHES[0][0][:8], BATCHES[0][1][:8])


def test_a_list_of_losses_is_no_total_and_count():
    def two_losses(model, X, y):
        scores = model(X)
        return [F.cross_entropy(scores, y), scores.square().mean()]

    model = network()
    with (
        evenstep.Trainer(model, sgd(model), objective=two_losses, devices=1) as trainer,
        pytest.raises(ModelError, match=r"returned a list, .*\(total, count\) is needed"),
    ):
        trainer.step(*BATCHES[0])
