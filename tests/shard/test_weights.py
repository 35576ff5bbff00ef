"""Weights of classes and of examples: trained like plain torch, or refused by name.

Whether they are cut may not depend on chance: on a number of classes, or of examples in a shard,
that happens to be the number of examples.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.errors import BatchError, ContractError, ModelError
from layouts import own
from reference import assert_same_bits, reference_training, whole_state
from trainers import open_trainer

DEVICES = [1, 2, own(2)]


def data(examples, classes):
    random = torch.Generator().manual_seed(examples)
    X = torch.randn(examples, 6, generator=random)
    return X, torch.rand(examples, classes, generator=random)


def built(classes):
    torch.manual_seed(0)
    return nn.Linear(6, classes)


def sgd_of(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def assert_trains_as_plainly(model, batches, devices, **loss):
    """Compare the bits with those of a plain loop over the shards."""
    plain, _ = reference_training(model, sgd_of, batches, shards=8, **loss)
    with open_trainer(model, devices=devices, **loss) as trainer:
        for batch in batches:
            trainer.step(*batch)
    assert_same_bits(whole_state(model, trainer.optimizer), plain)


# ---- in the loss

BY_EXAMPLE = {
    "one column": lambda w: nn.BCEWithLogitsLoss(weight=w[:, :1]),
    "all columns": lambda w: nn.BCEWithLogitsLoss(weight=w),
    "positive": lambda w: nn.BCEWithLogitsLoss(pos_weight=w[:, :1]),
    "partial": lambda w: functools.partial(F.binary_cross_entropy_with_logits, weight=w),
    "squares": lambda w: functools.partial(F.mse_loss, weight=w),
}


@pytest.mark.parametrize(("devices", "rows"), [(1, 4), (1, 32), (2, 32), (own(2), 4)], ids=str)
@pytest.mark.parametrize("make", BY_EXAMPLE.values(), ids=BY_EXAMPLE)
def test_a_loss_with_weights_for_each_example_is_refused(make, rows, devices):
    """As many weights as a shard, or the batch, has examples."""
    with (
        open_trainer(built(3), make(torch.rand(rows, 3)), devices=devices) as trainer,
        pytest.raises(ModelError, match=rf"weight of shape \({rows}, .*one for each example"),
    ):
        trainer.step(*data(32, 3))


def test_for_one_output_too():
    model, (X, y) = nn.Sequential(built(1), nn.Flatten(0)), data(32, 1)
    with (
        open_trainer(model, nn.BCEWithLogitsLoss(weight=torch.rand(32))) as trainer,
        pytest.raises(ModelError, match=r"weight of shape \(32,\), one for each example"),
    ):
        trainer.step(X, y[:, 0])


BY_CLASS = {
    "weight": lambda w: nn.BCEWithLogitsLoss(weight=w),
    "pos_weight": lambda w: nn.BCEWithLogitsLoss(pos_weight=w),
    "row": lambda w: nn.BCEWithLogitsLoss(weight=w[None]),
    "partial": lambda w: functools.partial(F.binary_cross_entropy_with_logits, weight=w),
}


# Shards of four examples, of one, and of as many examples in all as there are classes.
SIZES = pytest.mark.parametrize(("examples", "devices"), [(32, own(2)), (8, 1), (3, 2)], ids=str)


@SIZES
@pytest.mark.parametrize("make", BY_CLASS.values(), ids=BY_CLASS)
def test_weights_of_classes_are_not_cut(make, examples, devices):
    loss = make(torch.tensor([0.5, 1.0, 4.0]))
    assert_trains_as_plainly(built(3), [data(examples, 3)] * 3, devices, loss=loss)


@pytest.mark.parametrize("devices", DEVICES, ids=str)
def test_one_shard_is_the_plain_loop(devices):
    loss, model, batch = nn.BCEWithLogitsLoss(weight=torch.rand(32, 1)), built(3), data(32, 3)
    expected = loss(model(batch[0]), batch[1]).item()
    with open_trainer(model, loss, devices=devices, shards=1) as trainer:
        assert float(trainer.step(*batch)) == expected


# ---- in the batch


def class_weights(model, X, y, weights):
    return F.cross_entropy(model(X), y, weights, reduction="sum"), weights[y].sum()


def looked_up(model, X, y, weights):
    return (F.cross_entropy(model(X), y, reduction="none") * weights[y]).sum(), len(y)


def columns(model, X, y, weights):
    errors = (model(X) - F.one_hot(y, model.out_features)) ** 2
    return (errors * weights).sum(), len(y)


CLASSES = [10, 16, 8]  # in batches of 16 and of 8 examples, in 8 shards


@pytest.mark.parametrize(("examples", "devices"), [(16, 1), (16, own(2)), (8, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("classes", CLASSES, ids=str)
@pytest.mark.parametrize("objective", [class_weights, looked_up, columns])
@pytest.mark.thinned(2)
def test_weights_of_classes_that_are_not_shared_are_named(objective, classes, examples, devices):
    X, y, weights = data(examples, 1)[0], torch.arange(examples) % classes, torch.rand(classes)
    with open_trainer(built(classes), devices=devices, objective=objective) as trainer:
        with pytest.raises((BatchError, ContractError, RuntimeError, IndexError)) as found:
            trainer.step(X, y, weights)
        text = "\n".join([str(found.value), *getattr(found.value, "__notes__", [])])
        assert "evenstep.shared" in text
        assert "batch[2]" in text or isinstance(found.value, ContractError)
        assert classes == examples or isinstance(found.value, BatchError)
        trainer.step(X, y, evenstep.shared(weights))


@SIZES
def test_weights_of_examples_in_the_batch_are_cut(examples, devices):
    def objective(model, X, y, weights):
        loss = F.binary_cross_entropy_with_logits(model(X), y, weights, reduction="sum")
        return loss, len(X)

    batch = *data(examples, 1), torch.rand(examples, 1)
    assert_trains_as_plainly(built(1), [batch] * 3, devices, objective=objective)
