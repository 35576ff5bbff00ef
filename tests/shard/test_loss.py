"""Losses as totals and counts: the mean is exact, whatever a loss divides by."""

import functools
import math
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.errors import BatchError, ModelError, NonFiniteLossError
from evenstep.steps.executors import IndependentExecutor
from grouping import grouped
from layouts import own
from trainers import sgd
from zoo import CLASSES, build, make_batches

WEIGHT = torch.tensor([0.2, 3.0, 1.0, 0.5, 2.0])


def double_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES)).double()


def gradients_of_plain(loss, X, y):
    """The gradient of the mean over the whole batch at once, in double precision."""
    model = double_model()
    value = loss(model(X), y)
    value.backward()
    return value.item(), [parameter.grad for parameter in model.parameters()]


def gradients_of_trainer(X, y, **options):
    model = double_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with evenstep.Trainer(model, optimizer, **grouped(**options)) as trainer:
        value = float(trainer.step(X, y))
    return value, [parameter.grad for parameter in model.parameters()]


def with_ignored(y, index):
    y = y.clone()
    y[:5] = index  # the whole first shards, and a few more
    y[11] = index
    return y


LOSSES = {
    "cross entropy": nn.CrossEntropyLoss(),
    "class weights": nn.CrossEntropyLoss(weight=WEIGHT.double()),
    "ignored": nn.CrossEntropyLoss(ignore_index=-7),
    "weights and ignored": nn.CrossEntropyLoss(weight=WEIGHT.double(), ignore_index=-7),
    "smoothing": nn.CrossEntropyLoss(weight=WEIGHT.double(), ignore_index=-7, label_smoothing=0.1),
    "functional": F.cross_entropy,
    "functional partial": functools.partial(
        F.cross_entropy, weight=WEIGHT.double(), ignore_index=-7
    ),
    "multi margin": nn.MultiMarginLoss(),
}


@pytest.mark.parametrize("devices", [1, 2, own(3)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_the_mean_is_that_of_the_whole_batch(name, devices):
    X, y = make_batches((19,))[0]
    X = X.double()
    if "ignored" in name or "smoothing" in name or "partial" in name:
        y = with_ignored(y, -7)
    expected, expected_gradients = gradients_of_plain(LOSSES[name], X, y)
    value, gradients = gradients_of_trainer(X, y, loss=LOSSES[name], devices=devices)
    assert value == pytest.approx(expected, rel=1e-13)
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)


def test_negative_log_likelihood_with_weights():
    X, y = make_batches((19,))[0]
    X, y = X.double(), with_ignored(y, 2)
    loss = nn.NLLLoss(weight=WEIGHT.double(), ignore_index=2)
    plain, trained = nn.Sequential(double_model(), nn.LogSoftmax(1)), double_model()
    value = loss(plain(X), y)
    value.backward()
    trained = nn.Sequential(trained, nn.LogSoftmax(1))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.0)
    with evenstep.Trainer(trained, optimizer, loss, devices=2) as trainer:
        assert float(trainer.step(X, y)) == pytest.approx(value.item(), rel=1e-13)
    for mine, its in zip(trained.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-12, atol=1e-14)


def test_class_probabilities_and_positions():
    """Targets as probabilities, and one target for each pixel: (n, C, d) against (n, d)."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(13, CLASSES, 4, dtype=torch.float64, generator=generator)
    for target in (
        torch.rand(13, CLASSES, 4, dtype=torch.float64, generator=generator),
        torch.randint(0, CLASSES, (13, 4), generator=generator),
    ):
        results = []
        for run_plain in (True, False):
            torch.manual_seed(0)
            model = nn.Conv1d(CLASSES, CLASSES, 1).double()
            loss = nn.CrossEntropyLoss(weight=WEIGHT.double())
            if run_plain:
                value = loss(model(X), target)
                value.backward()
                results.append((value.item(), model.weight.grad))
            else:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
                with evenstep.Trainer(model, optimizer, loss, devices=2) as trainer:
                    results.append((float(trainer.step(X, target)), model.weight.grad))
        assert results[0][0] == pytest.approx(results[1][0], rel=1e-13)
        torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-12, atol=1e-14)


def token_objective(model, batch):
    """A token-weighted language model: dict batches, and a count of its own."""
    logits = model(batch["tokens"].float().reshape(-1, 1, 6, 6))
    counted = batch["mask"].sum()
    return (F.cross_entropy(logits, batch["next"], reduction="none") * batch["mask"]).sum(), counted


def test_an_objective_over_dict_batches_divides_by_its_count():
    generator = torch.Generator().manual_seed(3)
    batch = {
        "tokens": torch.randint(0, 9, (21, 36), generator=generator),
        "next": torch.randint(0, CLASSES, (21,), generator=generator),
        "mask": (torch.rand(21, generator=generator) < 0.5).double(),
    }
    batch["mask"][:6] = 0  # shards that count nothing

    def run(devices, shards):
        model = build("convolution").double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def objective(module, part):
            part = {**part, "tokens": part["tokens"].double()}
            logits = module(part["tokens"].reshape(-1, 1, 6, 6))
            losses = F.cross_entropy(logits, part["next"], reduction="none")
            return (losses * part["mask"]).sum(), part["mask"].sum()

        with evenstep.Trainer(
            model, optimizer, objective=objective, devices=devices, shards=shards
        ) as trainer:
            value = float(trainer.step(batch))
            accuracy = trainer.evaluate([batch], {"loss": objective})["loss"]
            return value, accuracy, trainer.fingerprint(), model[4].weight.grad

    one = run(1, 8)
    assert [run(devices, 8)[:3] for devices in (2, 3, own(2))] == [one[:3]] * 3
    whole = run(1, 1)
    assert one[0] == pytest.approx(whole[0], rel=1e-13)
    torch.testing.assert_close(one[3], whole[3], rtol=1e-12, atol=1e-14)


def trainer_with(**options):
    model = build("convolution")
    return evenstep.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), **grouped(**options)
    )


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize(
    "make",
    [
        lambda reduction: nn.CrossEntropyLoss(reduction=reduction),
        lambda reduction: nn.MSELoss(reduction=reduction),
        lambda reduction: functools.partial(F.cross_entropy, reduction=reduction),
        lambda reduction: functools.partial(F.mse_loss, reduction=reduction),
    ],
)
def test_other_reductions_are_refused_with_what_to_write(make, reduction):
    with pytest.raises(ModelError, match=f"reduction='{reduction}'.*objective=lambda model"):
        trainer_with(loss=make(reduction))


def test_exactly_one_of_loss_and_objective():
    with pytest.raises(ModelError, match="neither loss nor objective"):
        trainer_with()
    with pytest.raises(ModelError, match="both loss and objective"):
        trainer_with(loss=nn.MSELoss(), objective=token_objective)


def test_a_loss_with_parameters_is_refused():
    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    with pytest.raises(ModelError, match="Learned has parameters.*part of the model"):
        trainer_with(loss=Learned())


def test_a_loss_that_is_no_scalar_is_refused():
    X, y = make_batches((8,))[0]
    with (
        trainer_with(loss=lambda output, target: output.sum(1)) as trainer,
        pytest.raises(ModelError, match=r"the loss is shape \(1,\)|shape \(\d+,\).*scalar"),
    ):
        trainer.step(torch.cat([X, X]), torch.cat([y, y]))


def outer_alone(model, outer, X, y):
    return F.cross_entropy(outer(X), y, reduction="sum"), len(y)


def outer_beside(model, outer, X, y):
    decay = sum(parameter.square().sum() for parameter in outer.parameters())
    return F.cross_entropy(model(X), y, reduction="sum") + decay, len(y)


@pytest.mark.parametrize("objective", [outer_alone, outer_beside])
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("late", [0, 1])
def test_an_objective_that_uses_the_outer_model_is_refused(objective, in_flight, late, monkeypatch):
    X, y = make_batches((16,))[0]
    outer = build("convolution")
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
    compute = IndependentExecutor.compute

    def compute_late(executor, attempt, lane, *batches):
        if lane == late:
            time.sleep(0.1)  # so that the other lane could take all of its shards
        return compute(executor, attempt, lane, *batches)

    monkeypatch.setattr(IndependentExecutor, "compute", compute_late)
    with (
        evenstep.Trainer(
            outer,
            optimizer,
            objective=lambda model, X, y: objective(model, outer, X, y),
            devices=2,
            max_in_flight=in_flight,
            experiment=evenstep.Experiment(separable=False),
        ) as trainer,
        pytest.raises(ModelError, match="the model that it is given"),
    ):
        trainer.step(X, y).item()
    assert all(parameter.grad is None for parameter in outer.parameters())


def test_a_batch_that_counts_nothing_is_not_trained_on():
    X, y = make_batches((16,))[0]
    with trainer_with(loss=nn.CrossEntropyLoss(), devices=2) as trainer:
        before = trainer.fingerprint()
        with pytest.raises(NonFiniteLossError, match="counts nothing"):
            trainer.step(X, torch.full_like(y, -100))
        assert trainer.fingerprint() == before


def test_a_batch_without_targets_says_what_is_needed():
    with trainer_with(loss=nn.CrossEntropyLoss()) as trainer:
        X, y = make_batches((16,))[0]
        with pytest.raises((ModelError, BatchError), match=r"\(output, target\)"):
            trainer.step(X)
        with pytest.raises((ModelError, BatchError), match=r"\(output, target\)"):
            trainer.step(X, y, y)


# Counts that nothing can be divided by

COUNTS = {
    "NaN": (
        lambda y: math.nan,
        NonFiniteLossError,
        r"count of shard 0 .* is nan: the step was not",
    ),
    "a tensor with NaN": (lambda y: torch.tensor(math.nan), NonFiniteLossError, "is nan"),
    "infinite": (lambda y: math.inf, NonFiniteLossError, "is inf"),
    "a tensor with infinity": (lambda y: torch.tensor(math.inf), NonFiniteLossError, "is inf"),
    "minus infinity": (lambda y: -math.inf, NonFiniteLossError, "is -inf"),
    "negative": (
        lambda y: -len(y),
        ModelError,
        r"counts add up to -16.0 in step 1: at least 0 is needed",
    ),
    "a negative tensor": (lambda y: -(y >= 0).sum(), ModelError, "counts add up to -16.0"),
}


@pytest.mark.parametrize("check", ["first", "off"])
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("kind", COUNTS)
def test_a_count_that_nothing_can_be_divided_by_is_refused(kind, shards, check):
    count_of, error, pattern = COUNTS[kind]
    wrong = []

    def objective(model, X, y):
        total = F.cross_entropy(model(X), y, reduction="sum")
        return total, count_of(y) if wrong else len(y)

    X, y = make_batches((16,))[0]
    model = build("convolution")
    with evenstep.Trainer(
        model,
        sgd(model),
        objective=objective,
        devices=2,
        shards=shards,
        faults=evenstep.Faults(check=check),
    ) as trainer:
        trainer.step(X, y)
        before = trainer.fingerprint()
        wrong.append(True)
        with pytest.raises(error, match=pattern):
            trainer.step(X, y)
        assert trainer.fingerprint() == before
        assert trainer.steps_done == 1
        wrong.clear()
        trainer.step(X, y)


def test_a_single_shard_with_a_negative_count_is_no_error():
    """Examples may have negative weights (as simulated events in physics do)."""
    weights = torch.tensor([-1.0] * 4 + [1.0] * 12)

    def objective(model, X, y, weight):
        return (F.cross_entropy(model(X), y, reduction="none") * weight).sum(), weight.sum()

    X, y = make_batches((16,))[0]
    losses = []
    for shards in (1, 4):
        model = build("convolution")
        with evenstep.Trainer(
            model, sgd(model), objective=objective, devices=1, shards=shards
        ) as trainer:
            losses.append(float(trainer.step(X, y, weights)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def mean_alone(model, X, y):
    return F.cross_entropy(model(X), y)


def mean_with_outputs(model, X, y):
    scores = model(X)
    return F.cross_entropy(scores, y), {"right": (scores.argmax(1) == y).sum()}


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("objective", [mean_alone, mean_with_outputs], ids=lambda it: it.__name__)
def test_an_objective_may_return_the_mean_over_its_examples(objective, shards):
    X, y = make_batches((19,))[0]  # the last shard of four has fewer
    X = X.double()
    given = {"objective": lambda model, X, y: (mean_alone(model, X, y) * len(y), len(y))}
    wanted, gradients = gradients_of_trainer(X, y, shards=shards, **given)
    value, same = gradients_of_trainer(X, y, shards=shards, objective=objective)
    assert value == wanted
    assert all(map(torch.equal, same, gradients))


def test_outputs_stand_beside_a_mean():
    X, y = make_batches((19,))[0]
    model = double_model()
    right = int((model(X.double()).argmax(1) == y).sum())
    with evenstep.Trainer(model, sgd(model), objective=mean_with_outputs) as trainer:
        assert trainer.step(X.double(), y).outputs == {"right": right}


def test_a_mean_over_something_else_than_examples_is_refused():
    def of_counted(model, X, y):
        return F.cross_entropy(model(X), y, ignore_index=0)

    X = make_batches((19,))[0][0]
    model = double_model()
    with (
        evenstep.Trainer(model, sgd(model), objective=of_counted, shards=4) as trainer,
        pytest.raises(evenstep.errors.ContractError),
    ):
        trainer.step(X.double(), (torch.arange(19) > 2).long())  # 2 of 5 count, then 5 of 5


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(36, CLASSES), nn.Linear(36, CLASSES)

    def forward(self, one, other, *, scale):
        return scale * (self.first(one) - self.second(other))


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), nn.MultiMarginLoss()], ids=["classes", "mean"]
)
def test_a_model_gets_further_inputs_by_name(loss, devices):
    y = make_batches((19,))[0][1]
    torch.manual_seed(0)
    one, other, model = torch.randn(19, 36), torch.randn(19, 36), Two()
    wanted = loss(model(one, other, scale=2.0), y).item()
    with evenstep.Trainer(model, sgd(model), loss, devices=devices, shards=4) as trainer:
        assert float(trainer.backward(one, y, other=other, scale=2.0)) == pytest.approx(wanted)
        assert float(trainer.step(one, y, other=other, scale=2.0)) == pytest.approx(wanted)


def test_a_model_that_computes_its_loss_gets_all_by_name():
    class Own(nn.Linear):
        def forward(self, inputs, labels):
            return {"loss": F.cross_entropy(super().forward(inputs), labels)}

    torch.manual_seed(0)
    X, y, model = torch.randn(19, 6), torch.arange(19) % 3, Own(6, 3)
    wanted = model(X, y)["loss"].item()
    with evenstep.Trainer(model, sgd(model), lambda out: out["loss"], shards=4) as trainer:
        assert float(trainer.step(inputs=X, labels=y)) == pytest.approx(wanted)
