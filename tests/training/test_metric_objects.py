"""Objects of torchmetrics in `evaluate`: the same value on any devices, that of all examples."""

import json

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import InputError, ModelError
from launched import launched
from metric_objects import BATCHES, CLASSES, LOADER, collection, evaluated, metrics, plainly
from trainers import LAYOUTS, open_trainer, sgd
from zoo import build


@pytest.fixture(autouse=True, scope="module")
def _libraries():
    """They are imported where their tests run: it takes seconds, and slows down all others."""
    global torchmetrics, classification, Custom, Hidden, Random, Shapes
    torchmetrics = pytest.importorskip("torchmetrics")
    from torchmetrics import classification

    from custom_metrics import Custom, Hidden, Random, Shapes


def plain():
    """Return what the objects give, updated with all outputs in one process."""
    model, objects = build("convolution").eval(), metrics()
    with torch.no_grad():
        for one in objects.values():
            for X, y in BATCHES:
                one.update(model(X), y)
    return {name: one.compute() for name, one in objects.items()}


@pytest.mark.parametrize("shards", [1, 5, 8])
def test_the_values_are_those_of_all_examples(shards):
    found = evaluated(2, shards=shards)
    for name, value in plain().items():
        torch.testing.assert_close(torch.as_tensor(found[name], dtype=value.dtype), value)
    assert type(found["accuracy"]) is float
    assert found["confusion"].shape == (CLASSES, CLASSES)


@pytest.mark.parametrize("devices", LAYOUTS[1:], ids=str)
def test_the_bits_are_the_same_on_any_devices(devices):
    expected, found = evaluated(1), evaluated(devices)
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value))


@pytest.mark.slow
def test_the_bits_are_the_same_in_two_processes(tmp_path):
    done = launched(2, "evaluated.py", tmp_path)
    assert done.returncode == 0, done.stderr
    expected = [plainly(evaluated(1)), plainly(evaluated(1, LOADER))]
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == expected


def test_a_metric_object_and_a_function_may_stand_together_and_the_object_stays_as_it_is():
    accuracy = classification.MulticlassAccuracy(CLASSES, average="micro")
    with open_trainer(build("convolution"), devices=2) as trainer:
        both = {"ours": evenstep.metrics.accuracy, "theirs": accuracy}
        found = trainer.evaluate(BATCHES, both)
        again = trainer.evaluate(BATCHES, both)
    assert [*found] == ["ours", "theirs"]
    assert found["ours"] == pytest.approx(found["theirs"])
    assert again == found
    assert not accuracy.update_called


def test_a_collection_is_taken_as_it_is():
    with open_trainer(build("convolution"), devices=2) as trainer:
        found = trainer.evaluate(BATCHES, collection())
    expected = evaluated(1)
    assert found == {
        "MulticlassAccuracy": expected["accuracy"], "MulticlassF1Score": expected["f1"]
    }  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda: Custom("mean"),
        lambda: Custom("max"),
        lambda: Custom(torch.sum),
        lambda: Custom(None, []),
        lambda: torchmetrics.MinMaxMetric(Custom("sum")),
        lambda: Custom("sum") + 1.0,
        lambda: Hidden("sum"),
    ],
    ids=["mean", "max", "own", "list", "wrapper", "sum", "hidden"],
)
def test_every_kind_of_object_is_updated_once_with_each_batch(make):
    plain, outputs = make(), []
    with open_trainer(build("convolution"), devices=2) as trainer:
        (found,) = trainer.evaluate(BATCHES, {"mine": make()}).values()
        outputs = [trainer.predict([batch]) for batch in BATCHES]
    for output, (_, target) in zip(outputs, BATCHES, strict=True):
        plain.update(output, target)
    expected = plain.compute()
    assert type(found) is dict or torch.equal(torch.as_tensor(found), expected.to(torch.float32))
    assert type(found) is not dict or found == expected


class Identity(nn.Module):
    """Returns its input: an output that is the same in every shard."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x


def test_an_object_is_updated_with_the_whole_batch_whose_rows_it_judges_together():
    """Torchmetrics takes the numbers of an update for logits if any of them lies outside [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for size in (16, 17, 5):
        scores = 3 * torch.randn(size, generator=generator)
        first = -(-size // 3)  # of the first shard, which alone has no logits
        scores[:first] = torch.rand(first, generator=generator)
        batches.append((scores, torch.randint(2, (size,), generator=generator)))
    plain = {"accuracy": classification.BinaryAccuracy(), "auroc": classification.BinaryAUROC()}
    with open_trainer(Identity(), loss=nn.MSELoss(), shards=3) as trainer:
        found = trainer.evaluate(batches, plain)
    for name, one in plain.items():
        for batch in batches:
            one.update(*batch)
        assert found[name] == float(one.compute())


def test_what_an_object_draws_follows_from_the_seed():
    with open_trainer(build("convolution"), devices=1) as trainer:
        found = trainer.evaluate(BATCHES, {"mine": Random()})
    torch.rand(3)
    with open_trainer(build("convolution"), devices=2) as trainer:
        before = torch.get_rng_state()
        assert trainer.evaluate(BATCHES, {"mine": Random()}) == found
        assert torch.equal(torch.get_rng_state(), before)


def test_a_shared_target_is_given_whole_and_once():
    X, y = BATCHES[0]
    with open_trainer(build("convolution"), devices=2) as trainer:
        batch = X, y, evenstep.shared(torch.ones(3)), {"more": y}
        found = trainer.evaluate([batch], {"mine": Custom()})
    assert found == {"mine": float(y.sum() + 3 + 1)}


class Turned(nn.Module):
    """Takes and gives tensors whose examples lie along the second dimension."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.linear(x.transpose(0, 1).flatten(1)[:, :6]).T


def test_examples_along_another_dimension_are_joined_along_it():
    X = torch.randn(6, 10, 1)
    with open_trainer(Turned(), loss=nn.MSELoss(), batch_dim=1, shards=3) as trainer:
        found = trainer.evaluate([(X, torch.zeros(CLASSES, 10))], {"mine": Shapes()})
    assert found["mine"].tolist() == [CLASSES, 10, CLASSES, 10]


def test_micro_batches_of_ones_own_update_an_object_one_by_one():
    micro = [(torch.randn(n, 1, 6, 6), torch.ones(n)) for n in (2, 5, 3)]
    with open_trainer(build("convolution"), devices=2) as trainer:
        found = trainer.evaluate([evenstep.Shards(micro)], {"mine": Hidden(), "sum": Custom()})
    assert found == {"mine": 3.0, "sum": 10.0}


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = build("convolution")

    def forward(self, x):
        return {"scores": self.net(x), "layers": 1}


class Mean(Named):
    def forward(self, x):
        return self.net(x).mean(0)


@pytest.mark.parametrize(("model", "match"), [(Named, "returned a int"), (Mean, r"\(5,\)")])
def test_an_output_without_a_row_for_each_example_is_refused(model, match):
    with (
        open_trainer(model(), devices=2) as trainer,
        pytest.raises(ModelError, match=match) as caught,
    ):
        trainer.evaluate(BATCHES, {"mine": Custom()})
    told = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert any("use functions" in text for text in told)


def test_an_error_of_an_object_names_it():
    with (
        open_trainer(build("convolution"), devices=2) as trainer,
        pytest.raises(RuntimeError, match="same shape") as caught,
    ):
        trainer.evaluate(BATCHES, {"mine": torchmetrics.PearsonCorrCoef()})
    assert any('"mine"' in note for note in caught.value.__notes__)


def test_with_an_objective_it_is_refused():
    def objective(model, X, y):
        return nn.functional.cross_entropy(model(X), y, reduction="sum"), len(y)

    model = build("convolution")
    with (
        evenstep.Trainer(model, sgd(model), objective=objective) as trainer,
        pytest.raises(InputError, match="but the trainer has an objective: use trainer.predict"),
    ):
        trainer.evaluate(BATCHES, {"mine": Custom("sum")})
