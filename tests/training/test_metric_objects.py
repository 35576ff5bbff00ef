"""Objects of torchmetrics in `evaluate`: the same value on any devices, that of all examples."""

import json

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import BatchError, InputError
from launched import launched
from metric_objects import BATCHES, CLASSES, collection, evaluated, metrics
from trainers import LAYOUTS, open_trainer, sgd
from zoo import build

torchmetrics = pytest.importorskip("torchmetrics")
classification = pytest.importorskip("torchmetrics.classification")


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
    expected = {name: torch.as_tensor(value).tolist() for name, value in evaluated(1).items()}
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


class Custom(torchmetrics.Metric):
    """Counts examples, in a state with any reduction."""

    full_state_update = False

    def __init__(self, reduce_fx, default=None):
        super().__init__()
        self.add_state("seen", torch.tensor(0.0) if default is None else default, reduce_fx)
        self.calls = 0

    def update(self, output, target):
        if isinstance(self.seen, list):
            self.seen.append(output.sum().reshape(1))
        else:
            self.seen = self.seen + len(target)

    def compute(self):
        return torch.cat(self.seen) if isinstance(self.seen, list) else self.seen


class Hidden(Custom):
    def update(self, output, target):
        self.calls += 1


class Stateless(torchmetrics.Metric):
    def update(self, output, target):
        """Keep nothing."""

    def compute(self):
        return torch.tensor(1.0)


@pytest.mark.parametrize(
    ("reduce_fx", "expected"), [("sum", 65), ("mean", 65 / 24), ("max", 3), ("min", 2)]
)
def test_states_are_merged_by_their_reduction(reduce_fx, expected):
    with open_trainer(build("convolution"), devices=2) as trainer:
        found = trainer.evaluate(BATCHES, {"seen": Custom(reduce_fx)})
    assert found["seen"] == pytest.approx(expected)


@pytest.mark.parametrize("reduce_fx", ["cat", None])
def test_lists_are_joined_in_the_order_of_the_shards(reduce_fx):
    with open_trainer(build("convolution"), devices=2) as trainer:
        (found,) = trainer.evaluate(BATCHES, {"seen": Custom(reduce_fx, [])}).values()
        outputs = [trainer.predict([batch]) for batch in BATCHES]
    sums = [part.sum() for output in outputs for part in output.tensor_split(8)]
    torch.testing.assert_close(found, torch.stack(sums))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Custom(None), r'of type Custom can\'t .*"seen" has dist_reduce_fx=None'),
        (lambda: Custom(torch.sum), '"seen" has dist_reduce_fx=<built-in method sum'),
        (lambda: Custom("sum", []), '"seen" has dist_reduce_fx=<function dim_zero_sum'),
        (lambda: Stateless(), "has no states of its own"),
        (lambda: torchmetrics.MinMaxMetric(Custom("sum")), "wraps Custom: give metrics without"),
        (lambda: Custom("sum") + 1.0, "wraps Custom: give metrics without"),
        (lambda: torchmetrics.PearsonCorrCoef(), "dist_reduce_fx=None"),
        (lambda: Hidden("sum"), "its update writes the attribute calls: let it be a state"),
    ],
    ids=["none", "own", "list", "stateless", "wrapper", "sum", "pearson", "hidden"],
)
def test_what_cant_be_merged_is_refused_by_name(make, match):
    with (
        open_trainer(build("convolution"), devices=2) as trainer,
        pytest.raises(InputError, match=match) as caught,
    ):
        trainer.evaluate(BATCHES, {"mine": make()})
    assert 'the metric "mine"' in str(caught.value)


def test_with_an_objective_it_is_refused():
    def objective(model, X, y):
        return nn.functional.cross_entropy(model(X), y, reduction="sum"), len(y)

    model = build("convolution")
    with (
        evenstep.Trainer(model, sgd(model), objective=objective) as trainer,
        pytest.raises(InputError, match="but the trainer has an objective: use trainer.predict"),
    ):
        trainer.evaluate(BATCHES, {"mine": Custom("sum")})


def test_without_batches_nothing_is_counted():
    with (
        open_trainer(build("convolution")) as trainer,
        pytest.raises(BatchError, match="counted no examples"),
    ):
        trainer.evaluate([], {"mine": Custom("sum")})


class Total(torchmetrics.Metric):
    """Sums the targets."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, output, target):
        self.total += target.sum()

    def compute(self):
        return self.total


@pytest.mark.parametrize("devices", [1, 2])
def test_sums_are_those_of_the_canonical_tree(devices):
    targets = torch.tensor([1e8, -1e8, 1.0, 1.0])  # (a + b) + (c + d); another order loses the ones
    model = nn.Linear(2, 1)
    with open_trainer(model, loss=nn.MSELoss(), devices=devices, shards=4) as trainer:
        assert trainer.evaluate([(torch.ones(4, 2), targets)], {"total": Total()}) == {"total": 2.0}
