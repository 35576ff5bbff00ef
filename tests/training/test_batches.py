"""Batches with tensors that every shard gets whole, and with examples along another dimension."""

import copy
import functools
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import TensorDataset

import evenstep
from evenstep.data import Loader
from evenstep.errors import BatchError, ContractError, ModelError
from grouping import grouped
from layouts import own
from reference import assert_same_bits, bits_of, whole_state
from trainers import open_trainer

LAYOUTS = [1, 2, 3, own(2), own(3)]
CLASSES = 5
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def linear(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(4, CLASSES, dtype=dtype)


def rows(size, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(size, 4, generator=generator, dtype=dtype)
    return X, torch.randint(CLASSES, (size,), generator=generator)


def weighted(model, X, rest):
    """Cross entropy with class weights that come with the batch."""
    total = F.cross_entropy(model(X), rest["y"], rest["weights"], reduction="sum")
    return total, rest["weights"][rest["y"]].sum()


def train(batches, objective=weighted, model=None, **options):
    """Train; return the state, the losses and the trainer."""
    model = model or linear()
    optimizer = SGD(model.parameters())
    options = {"devices": 2, **options}
    with evenstep.Trainer(model, optimizer, **grouped(objective=objective, **options)) as trainer:
        losses = [float(loss) for loss in [trainer.step(*batch) for batch in batches]]
    return whole_state(model, optimizer), losses, trainer


def weights(step, dtype=torch.float32):
    """As many as a shard of the 40 examples has, so that their rows could be cut unnoticed."""
    return 1 + step + torch.arange(CLASSES, dtype=dtype)


def with_weights(steps, dtype=torch.float32):
    return [
        (X, {"y": y, "weights": evenstep.shared(weights(step, dtype))})
        for step in range(steps)
        for X, y in [rows(40, step, dtype)]
    ]


def test_a_loss_of_shared_targets_is_weighed_by_the_examples():
    """A mean loss over targets of which one is shared."""

    def loss(output, y, scale):
        return ((output.sum(1) - y) * scale).square().mean()

    X, y = rows(21)
    scale = torch.tensor([2.0])
    model, whole = linear(), linear()
    with evenstep.Trainer(model, SGD(model.parameters()), loss, devices=2) as trainer:
        found = float(trainer.step(X, y, evenstep.shared(scale)))
    assert found == pytest.approx(loss(whole(X), y, scale).item(), rel=1e-5)


@pytest.mark.slow
def test_a_shared_tensor_in_compiled_shards():
    expected, losses, _ = train(with_weights(2))
    state, found, trainer = train(with_weights(2), compile=True)
    if "too old" in trainer.hybridized.why_not:
        pytest.skip(trainer.hybridized.why_not)
    assert not trainer.hybridized.why_not
    assert found == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(state["parameter/weight"], expected["parameter/weight"])


def test_a_shared_tensor_in_evaluation_and_prediction():
    def total_of(model, X, rest):
        return (model(X)[:, 0] * rest["weights"].sum()).sum(), len(X)

    (batch,) = with_weights(1)
    _, _, trainer = train([])
    model = trainer.model
    with trainer, torch.no_grad():
        found = trainer.evaluate([batch], {"total": total_of})["total"]
        assert found == pytest.approx((model(batch[0])[:, 0].mean() * 15).item(), rel=1e-5)
        predicted = trainer.predict([batch], lambda model, X, rest: model(X) * rest["weights"])
        torch.testing.assert_close(predicted, model(batch[0]) * weights(0))


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("devices", [1, 3, own(2)], ids=str)
def test_a_shard_that_writes_to_a_shared_tensor_is_refused(devices, max_in_flight):
    def writes(model, X, rest):
        rest["weights"].mul_(2)
        return weighted(model, X, rest)

    model, untouched = linear(), linear()
    with pytest.raises(ContractError, match=r"wrote to the tensor of shape \(5,\)"):
        train(with_weights(1), writes, model, devices=devices, max_in_flight=max_in_flight)
    assert_same_bits(model.state_dict(), untouched.state_dict())


def test_a_shared_tensor_that_is_written_to_in_flight_is_refused():
    first, second = with_weights(2)
    with open_trainer(linear(), objective=weighted, devices=1, max_in_flight=2) as trainer:
        trainer.step(*first)
        cut = trainer._executor.group.cut
        trainer._executor.group.cut = lambda *given: written(
            cut(*given), second[1]["weights"].tensor
        )
        trainer.step(*second)
        with pytest.raises(BatchError, match="the batch was written to"):
            trainer.waitall()


def written(cut, tensor):
    """Write to a tensor of a batch that was just cut."""
    tensor.zero_()
    return cut


# Examples along another dimension


class Tagger(nn.Module):
    """A recurrent network over (time, batch, features): a score for each class at each time."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.body = nn.GRU(3, 6, dtype=dtype)
        self.head = nn.Linear(6, CLASSES, dtype=dtype)

    def forward(self, X):
        return self.head(self.body(X)[0])


class Classifier(Tagger):
    """A score for each class after the last time: (batch, classes)."""

    def forward(self, X):
        return super().forward(X)[-1]


def tagger(kind=Tagger, dtype=torch.float32):
    torch.manual_seed(1)
    return kind(dtype)


def sequences(size, time=7, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(time, size, 3, generator=generator, dtype=dtype)
    return X, torch.randint(CLASSES, (time, size), generator=generator)


def tags_total(model, X, y, lengths):
    """The loss of the first `lengths` times of each sequence."""
    loss = F.cross_entropy(model(X).flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
    counted = torch.arange(len(X))[:, None] < lengths
    return (loss * counted).sum(), counted.sum()


def sequence_batches(sizes, dtype=torch.float32):
    return [
        (*sequences(size, seed=size, dtype=dtype), torch.arange(size) % 7 + 1) for size in sizes
    ]


def of_weights(dtype=torch.float32):
    return with_weights(3, dtype), weighted, linear(dtype), {}


def of_times(dtype=torch.float32):
    batches = sequence_batches((21, 16, 7, 5), dtype)
    return batches, tags_total, tagger(dtype=dtype), {"batch_dim": 1}


KINDS = {"a shared tensor": of_weights, "sequences": of_times}


@functools.cache
def alone(kind):
    *given, options = KINDS[kind]()
    return train(*given, devices=1, **options)[:2]


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("devices", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(2)
def test_every_layout_gives_the_same_bits(kind, devices, max_in_flight):
    *given, options = KINDS[kind]()
    state, losses, _ = train(*given, devices=devices, max_in_flight=max_in_flight, **options)
    assert losses == alone(kind)[1]
    assert_same_bits(state, alone(kind)[0])


def unshared(leaf):
    return leaf.tensor if hasattr(leaf, "tensor") else leaf


@pytest.mark.parametrize("shards", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_such_batches_train_as_the_whole_batch(kind, shards):
    """A batch of sequences may be as long as it is wide."""
    batches, objective, model, options = KINDS[kind](torch.float64)
    whole = copy.deepcopy(model)
    _, losses, _ = train(batches, objective, model, shards=shards, **options)
    optimizer = SGD(whole.parameters())
    for batch, found in zip(batches, losses, strict=True):
        optimizer.zero_grad()
        total, count = objective(whole, *tree_map(unshared, batch))
        (total / count).backward()
        optimizer.step()
        assert found == pytest.approx((total / count).item(), rel=1e-12)
    for mine, its in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-14)


def test_batches_of_sequences_with_a_mean_loss():
    def loss(output, y):
        return F.cross_entropy(output.flatten(0, 1), y.flatten()) + 0

    X, y = sequences(21)
    model, whole = tagger(), tagger()
    with of_sequences(model, loss) as trainer:
        assert float(trainer.step(X, y)) == pytest.approx(loss(whole(X), y).item(), rel=1e-5)


def test_batch_dim_is_part_of_the_experiment_and_of_checkpoints(tmp_path):
    batches = sequence_batches((16, 16))
    expected, _, _ = train(batches, tags_total, tagger(), batch_dim=1)
    _, _, trainer = train(batches[:1], tags_total, tagger(), batch_dim=1)
    trainer.save(tmp_path)
    model = tagger()
    optimizer = SGD(model.parameters())
    with evenstep.Trainer.load(tmp_path, model, optimizer, objective=tags_total) as resumed:
        assert resumed.experiment.batch_dim == 1
        resumed.step(*batches[1])
    assert_same_bits(whole_state(model, optimizer), expected)


def of_sequences(model, loss=None, **options):
    given = SGD(model.parameters()), loss or nn.MSELoss()
    return evenstep.Trainer(model, *given, **grouped(batch_dim=1, **options))


@pytest.mark.parametrize("devices", [1, 2], ids=str)
@pytest.mark.parametrize(("kind", "dim"), [(Tagger, 1), (Classifier, 0)])
def test_predictions_lie_along_the_dimension_that_has_the_examples(kind, dim, devices):
    parts = [sequences(size, seed=size)[0] for size in (10, 3)]
    model = tagger(kind)
    with of_sequences(model, devices=devices) as trainer:
        found = trainer.predict(parts)
        assert bits_of(trainer.predict(parts, dim=dim)) == bits_of(found)
        with torch.no_grad():
            torch.testing.assert_close(found, model(torch.cat(parts, 1)))


def test_predictions_that_may_lie_along_either_dimension_are_refused():
    with of_sequences(tagger(), shards=2) as trainer:
        square = sequences(8, time=4)[0]  # 4 examples in a shard, of 4 times each
        with pytest.raises(ModelError, match=r"\(4, 4, 5\), may lie .* dim=1 or dim=0"):
            trainer.predict([square])
        assert trainer.predict([square], dim=1).shape == (4, 8, CLASSES)
        with pytest.raises(ModelError, match="a row for each example along dimension 2"):
            trainer.predict([square], dim=2)


def by_time(examples):
    """Make a batch (time, batch, features) of examples, and a tensor for all of them."""
    X, y = zip(*examples, strict=True)
    return torch.stack(X, 1), torch.stack(y, 1), evenstep.shared(torch.arange(2.0))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loaders_collate_makes_such_batches(workers):
    def objective(model, X, y, scale):
        total, count = tags_total(model, X, y, torch.full((X.shape[1],), 7))
        return total * scale[1], count

    X, y = sequences(40)
    data = TensorDataset(X.transpose(0, 1), y.transpose(0, 1))
    model = tagger()
    optimizer = SGD(model.parameters())
    options = grouped(objective=objective, batch_dim=1)
    with evenstep.Trainer(model, optimizer, **options) as trainer:
        loader = Loader(data, 16, seed=2, collate_fn=by_time, num_workers=workers)
        for batch in trainer.epoch(loader):
            trainer.step(*batch)
    batches = [by_time(list(zip(*rows, strict=True))) for rows in Loader(data, 16, seed=2)]
    expected, _, _ = train(batches, objective, tagger(), batch_dim=1)
    assert_same_bits(whole_state(model, optimizer), expected)


class Named(nn.Module):
    """A model whose inputs have names, as a tokenizer gives them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs, mask=None):
        return self.layer(inputs if mask is None else inputs * mask)


class OfMapping(Named):
    def forward(self, batch):
        return self.layer(batch["inputs"] * batch["mask"])


def named_batches():
    X = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    return [{"inputs": x, "mask": (x > 0).float(), "labels": torch.arange(9) % 3} for x in X]


@pytest.mark.parametrize("make_model", [Named, OfMapping])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kind", [dict, types.MappingProxyType])
def test_predict_unpacks_batches_with_names_as_step_does(make_model, devices, kind):
    def objective(model, inputs, mask, labels):
        return nn.functional.cross_entropy(model(inputs, mask), labels)

    model, plain = make_model(), Named()
    batches = [kind(one) for one in named_batches()]
    expected = torch.cat([plain(one["inputs"], one["mask"]) for one in batches]).detach()
    optimizer = SGD(model.parameters())
    with evenstep.Trainer(model, optimizer, objective=objective, devices=devices) as trainer:
        torch.testing.assert_close(trainer.predict(batches), expected)
        for forward in (
            lambda model, inputs, mask, labels: Named.forward(model, inputs, mask),
            lambda model, inputs, **rest: Named.forward(model, inputs, rest["mask"]),
            lambda model, batch: Named.forward(model, batch["inputs"], batch["mask"]),
        ):
            torch.testing.assert_close(trainer.predict(batches, forward), expected)
