"""Losses as totals and counts: the mean is exact, whatever a loss divides by."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evenstep.errors import ContractError, ModelError, NonFiniteLossError
from evenstep.shard import loss as loss_module
from layouts import own
from trainers import open_trainer
from zoo import CLASSES, build, make_batches

WEIGHT = torch.tensor([0.2, 3.0, 1.0, 0.5, 2.0]).double()
X, Y = make_batches((19,))[0]
X = X.double()
IGNORED = Y.clone()
IGNORED[[0, 1, 2, 3, 4, 11]] = -7  # the whole first shards, and a few more
BATCH = make_batches((16,))[0]


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES)).double()


def logarithms():
    return nn.Sequential(linear(), nn.LogSoftmax(1))


def of_positions():
    torch.manual_seed(0)
    return nn.Conv1d(CLASSES, CLASSES, 1).double()


def positions(drawn):
    """Return inputs (n, C, d), and what `drawn(generator)` gives as their targets."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(13, CLASSES, 4, dtype=torch.float64, generator=generator)
    return inputs, drawn(generator)


PROBABILITIES = positions(lambda g: torch.rand(13, CLASSES, 4, dtype=torch.float64, generator=g))
PIXELS = positions(lambda g: torch.randint(0, CLASSES, (13, 4), generator=g))
WEIGHED = nn.CrossEntropyLoss(weight=WEIGHT)
IGNORES = {"weight": WEIGHT, "ignore_index": -7}
LOSSES = {
    "cross entropy": (linear, nn.CrossEntropyLoss(), (X, Y)),
    "class weights": (linear, WEIGHED, (X, Y)),
    "ignored": (linear, nn.CrossEntropyLoss(ignore_index=-7), (X, IGNORED)),
    "weights and ignored": (linear, nn.CrossEntropyLoss(**IGNORES), (X, IGNORED)),
    "smoothing": (linear, nn.CrossEntropyLoss(**IGNORES, label_smoothing=0.1), (X, IGNORED)),
    "functional": (linear, F.cross_entropy, (X, Y)),
    "functional partial": (linear, functools.partial(F.cross_entropy, **IGNORES), (X, IGNORED)),
    "multi margin": (linear, nn.MultiMarginLoss(), (X, Y)),
    "negative log likelihood": (logarithms, nn.NLLLoss(**IGNORES), (X, IGNORED)),
    "probabilities": (of_positions, WEIGHED, PROBABILITIES),
    "pixels": (of_positions, WEIGHED, PIXELS),
}


def loss_and_gradients(model, batch, *loss, **options):
    """Return the loss and the gradients of one step."""
    with open_trainer(model, *loss, **options) as trainer:
        value = float(trainer.step(*batch))
    return value, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("devices", [1, 2, own(3)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_the_mean_is_that_of_the_whole_batch(name, devices):
    """Against the gradient of the mean over the whole batch at once, in double precision."""
    make_model, loss, batch = LOSSES[name]
    plain = make_model()
    expected = loss(plain(batch[0]), batch[1])
    expected.backward()
    value, gradients = loss_and_gradients(make_model(), batch, loss, devices=devices)
    assert value == pytest.approx(expected.item(), rel=1e-13)
    for got, parameter in zip(gradients, plain.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad, rtol=1e-12, atol=1e-14)


def test_an_objective_over_dict_batches_divides_by_its_count():
    """A token-weighted language model: dict batches, and a count of its own."""
    generator = torch.Generator().manual_seed(3)
    batch = {
        "tokens": torch.randint(0, 9, (21, 36), generator=generator),
        "next": torch.randint(0, CLASSES, (21,), generator=generator),
        "mask": (torch.rand(21, generator=generator) < 0.5).double(),
    }
    batch["mask"][:6] = 0  # shards that count nothing

    def objective(module, part):
        logits = module(part["tokens"].double().reshape(-1, 1, 6, 6))
        losses = F.cross_entropy(logits, part["next"], reduction="none")
        return (losses * part["mask"]).sum(), part["mask"].sum()

    def run(devices, shards):
        model = build("convolution").double()
        with open_trainer(model, objective=objective, devices=devices, shards=shards) as trainer:
            value = float(trainer.step(batch))
            evaluated = trainer.evaluate([batch], {"loss": objective})["loss"]
            return value, evaluated, trainer.fingerprint(), model[4].weight.grad

    one = run(1, 8)
    assert [run(devices, 8)[:3] for devices in (2, 3, own(2))] == [one[:3]] * 3
    whole = run(1, 1)
    assert one[0] == pytest.approx(whole[0], rel=1e-13)
    torch.testing.assert_close(one[3], whole[3], rtol=1e-12, atol=1e-14)


class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


REFUSED = {
    "neither": (None, None, "neither loss nor objective"),
    "both": (nn.MSELoss(), lambda model, batch: 0, "both loss and objective"),
    "with parameters": (Learned(), None, "Learned has parameters.*part of the model"),
    **{
        f"{kind}, {reduction}": (
            make(reduction=reduction),
            None,
            f"reduction='{reduction}'.*objective=lambda model",
        )
        for reduction in ("sum", "none")
        for kind, make in {
            "cross entropy": nn.CrossEntropyLoss,
            "squares": nn.MSELoss,
            "cross entropy as a function": functools.partial(functools.partial, F.cross_entropy),
            "squares as a function": functools.partial(functools.partial, F.mse_loss),
        }.items()
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_is_no_mean_over_examples_is_refused_at_once(name):
    loss, objective, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        open_trainer(build("convolution"), loss, objective=objective)


def test_a_loss_that_is_no_scalar_is_refused():
    with (
        open_trainer(build("convolution"), lambda output, target: output.sum(1)) as trainer,
        pytest.raises(ModelError, match=r"the loss is shape \(1,\)|shape \(\d+,\).*scalar"),
    ):
        trainer.step(*BATCH)


def test_a_batch_that_counts_nothing_is_not_trained_on():
    with open_trainer(build("convolution")) as trainer:
        before = trainer.fingerprint()
        with pytest.raises(NonFiniteLossError, match="counts nothing"):
            trainer.step(BATCH[0], torch.full_like(BATCH[1], -100))
        assert trainer.fingerprint() == before


# Counts that nothing can be divided by

COUNTS = {
    "NaN": (lambda y: math.nan, NonFiniteLossError, "count of shard 0 .* is nan: the step was not"),
    "a tensor with NaN": (lambda y: torch.tensor(math.nan), NonFiniteLossError, "is nan"),
    "infinite": (lambda y: math.inf, NonFiniteLossError, "is inf"),
    "a tensor with infinity": (lambda y: torch.tensor(math.inf), NonFiniteLossError, "is inf"),
    "minus infinity": (lambda y: -math.inf, NonFiniteLossError, "is -inf"),
    "negative": (lambda y: -len(y), ModelError, "add up to -16.0 in step 1: at least 0 is needed"),
    "a negative tensor": (lambda y: -(y >= 0).sum(), ModelError, "counts add up to -16.0"),
}


@pytest.mark.parametrize(("shards", "check"), [(1, "off"), (4, "first")])
@pytest.mark.parametrize("kind", COUNTS)
def test_a_count_that_nothing_can_be_divided_by_is_refused(kind, shards, check):
    count_of, error, pattern = COUNTS[kind]
    wrong = []

    def objective(model, X, y):
        total = F.cross_entropy(model(X), y, reduction="sum")
        return total, count_of(y) if wrong else len(y)

    with open_trainer(
        build("convolution"), objective=objective, shards=shards, check=check
    ) as trainer:
        trainer.step(*BATCH)
        before = trainer.fingerprint()
        wrong.append(True)
        with pytest.raises(error, match=pattern):
            trainer.step(*BATCH)
        assert trainer.fingerprint() == before
        assert trainer.steps_done == 1
        wrong.clear()
        trainer.step(*BATCH)


def test_a_single_shard_with_a_negative_count_is_no_error():
    """Examples may have negative weights (as simulated events in physics do)."""
    weights = torch.tensor([-1.0] * 4 + [1.0] * 12)

    def objective(model, X, y, weight):
        return (F.cross_entropy(model(X), y, reduction="none") * weight).sum(), weight.sum()

    losses = [
        loss_and_gradients(
            build("convolution"), (*BATCH, weights), objective=objective, devices=1, shards=shards
        )[0]
        for shards in (1, 4)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def mean_alone(model, X, y):
    return F.cross_entropy(model(X), y)


def mean_with_outputs(model, X, y):
    scores = model(X)
    return F.cross_entropy(scores, y), {"right": (scores.argmax(1) == y).sum()}


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("objective", [mean_alone, mean_with_outputs], ids=lambda it: it.__name__)
def test_an_objective_may_return_the_mean_over_its_examples(objective, shards):
    """Of 19 examples: the last shard of four has fewer."""

    def total(model, X, y):
        return mean_alone(model, X, y) * len(y), len(y)

    found, gradients = loss_and_gradients(linear(), (X, Y), shards=shards, objective=objective)
    wanted, expected = loss_and_gradients(linear(), (X, Y), shards=shards, objective=total)
    assert found == wanted
    assert all(map(torch.equal, gradients, expected))


def test_outputs_stand_beside_a_mean():
    model = linear()
    right = int((model(X).argmax(1) == Y).sum())
    with open_trainer(model, objective=mean_with_outputs) as trainer:
        assert trainer.step(X, Y).outputs == {"right": right}


def test_a_mean_over_something_else_than_examples_is_refused():
    def of_counted(model, X, y):
        return F.cross_entropy(model(X), y, ignore_index=0)

    with (
        open_trainer(linear(), objective=of_counted, shards=4) as trainer,
        pytest.raises(ContractError),
    ):
        trainer.step(X, (torch.arange(19) > 2).long())  # 2 of 5 count, then 5 of 5


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
    torch.manual_seed(0)
    one, other, model = torch.randn(19, 36), torch.randn(19, 36), Two()
    wanted = loss(model(one, other, scale=2.0), Y).item()
    with open_trainer(model, loss, devices=devices, shards=4) as trainer:
        for call in (trainer.backward, trainer.step):
            assert float(call(one, Y, other=other, scale=2.0)) == pytest.approx(wanted)


def test_a_model_that_computes_its_loss_gets_all_by_name():
    class Own(nn.Linear):
        def forward(self, inputs, labels):
            return {"loss": F.cross_entropy(super().forward(inputs), labels)}

    torch.manual_seed(0)
    X, y, model = torch.randn(19, 6), torch.arange(19) % 3, Own(6, 3)
    wanted = model(X, y)["loss"].item()
    with open_trainer(model, lambda out: out["loss"], shards=4) as trainer:
        assert float(trainer.step(inputs=X, labels=y)) == pytest.approx(wanted)


@pytest.mark.parametrize("shape", [(6, 5, 4), (6, 5, 3, 2)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("examples", [6, None])
def test_losses_of_pixels_are_added_up_by_a_sum_of_its_own_where_torch_has_no_deterministic_one(
    monkeypatch, examples, smoothing, shape
):
    """As on GPUs; here in float64, against the mean of the plain loss."""
    reductions = []

    def spy(*given, **named):
        reductions.append(given[6])
        return cross_entropy(*given, **named)

    cross_entropy = torch.nn.functional.cross_entropy
    monkeypatch.setattr(loss_module, "_has_random_sum", lambda *_: True)
    monkeypatch.setattr(loss_module.F, "cross_entropy", spy)
    torch.manual_seed(0)
    output = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    target = torch.randint(5, (shape[0], *shape[2:]))
    target[0] = -100
    plain = nn.CrossEntropyLoss(torch.rand(5, dtype=torch.float64), label_smoothing=smoothing)
    placed = loss_module._PlacedLoss(plain)
    total, count, *_ = loss_module._class_objective(placed, lambda x: x, (output, target), examples)
    expected = cross_entropy(output, target, plain.weight, label_smoothing=smoothing)
    assert torch.allclose(total / count, expected, rtol=1e-12)
    assert reductions == ["none"]
