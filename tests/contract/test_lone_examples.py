"""BatchNorm and shards of one example: judged by the values a channel, before a step is taken."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.errors import BatchError
from grouping import grouped
from layouts import own
from trainers import sgd

SAID = r"batch of 9 examples over 8 shards leaves shard 1 with 1 example, too few for BatchNorm: "


def images():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)
    )


def pooled():
    """A network whose BatchNorm2d gets images of one pixel."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 6), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 4))


def rows():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))


def batch_of(examples):
    generator = torch.Generator().manual_seed(examples)
    return torch.randn(examples, 1, 6, 6, generator=generator), torch.arange(examples) % 4


def open_trainer(model, devices=1, **options):
    return evenstep.Trainer(
        model, sgd(model), nn.CrossEntropyLoss(), **grouped(devices=devices, **options)
    )


def plain_step(model, X, y, bounds):
    """Take a step by torch alone, on shards whose gradients are added from left to right."""
    model.zero_grad()
    opening = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for lo, hi in bounds:
        for name, buffer in model.named_buffers():
            buffer.data.copy_(opening[name])
        (nn.CrossEntropyLoss(reduction="sum")(model(X[lo:hi]), y[lo:hi]) / len(X)).backward()


def train(trainer, loader):
    for batch in trainer.epoch(loader):
        trainer.step(*batch)


@pytest.mark.parametrize(("devices", "check"), [(1, "first"), (2, "off"), (own(3), "first")])
def test_one_image_a_shard_is_trained(devices, check):
    X, y = batch_of(9)
    model, expected = images(), images()
    plain_step(expected, X, y, [(0, 2), *((place, place + 1) for place in range(2, 9))])
    with open_trainer(model, devices, check=check) as trainer:
        trainer.backward(X, y)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("make_model", [rows, pooled])
@pytest.mark.parametrize("devices", [1, own(2)], ids=str)
def test_one_value_a_channel_is_refused_before_the_step(make_model, devices):
    model = make_model()
    with open_trainer(model, devices) as trainer:
        before = trainer.fingerprint()
        with pytest.raises(BatchError, match=SAID + "use at most 4 shards, or drop the last"):
            trainer.step(*batch_of(9))
        assert trainer.fingerprint() == before
        assert trainer.steps_done == 0
        trainer.step(*batch_of(16))
        with pytest.raises(BatchError, match=SAID):
            trainer.backward(*batch_of(9))
        with pytest.raises(BatchError, match="batch of 3 .* shard 0 with .* at most 1 shard, or"):
            trainer.step(*batch_of(3))


LOADERS = {
    "evenstep's": lambda data, **options: evenstep.data.Loader(data, 16, **options),
    "torch's": lambda data, **options: DataLoader(data, 16, shuffle=True, **options),
    "a sampler's": lambda data, drop_last=False: DataLoader(
        data, batch_sampler=torch.utils.data.BatchSampler(range(len(data)), 16, drop_last)
    ),
}  # fmt: skip


@pytest.mark.parametrize("make_loader", LOADERS.values(), ids=LOADERS)
def test_a_short_last_batch_is_refused_before_the_first_step(make_loader):
    data = TensorDataset(*batch_of(41))
    with open_trainer(rows()) as trainer:
        with pytest.raises(BatchError, match=SAID):
            train(trainer, make_loader(data))
        assert trainer.steps_done == 0
    with open_trainer(rows()) as trainer:
        train(trainer, make_loader(data, drop_last=True))
        assert trainer.steps_done == 2


@pytest.mark.parametrize("make_loader", LOADERS.values(), ids=LOADERS)
def test_a_short_last_batch_of_images_is_trained(make_loader):
    with open_trainer(images()) as trainer:
        train(trainer, make_loader(TensorDataset(*batch_of(41))))
        assert trainer.steps_done == 3


def test_of_a_list_the_last_batch_is_refused_before_its_step():
    with open_trainer(rows()) as trainer:
        with pytest.raises(BatchError, match=SAID):
            train(trainer, [batch_of(16), batch_of(9)])
        assert trainer.steps_done == 1


def test_one_shard_and_a_last_batch_of_one_example():
    with open_trainer(rows(), shards=1) as trainer:
        with pytest.raises(BatchError, match="of 1 example .* drop the last batch"):
            train(trainer, DataLoader(TensorDataset(*batch_of(17)), 16))
        assert trainer.steps_done == 0


def test_evaluation_mode_needs_no_second_value():
    with open_trainer(rows()) as trainer:
        trainer.model.eval()
        trainer.step(*batch_of(9))
        assert trainer.steps_done == 1


def test_looking_changes_nothing():
    def trained(sizes):
        model = images()
        model.insert(3, nn.Dropout(0.2))
        with open_trainer(model) as trainer:
            for batch in trainer.epoch(DataLoader(TensorDataset(*batch_of(sum(sizes))), 16)):
                if len(batch[0]) == 16:
                    trainer.step(*batch)
            return trainer.fingerprint()

    def by_hand():
        model = images()
        model.insert(3, nn.Dropout(0.2))
        X, y = batch_of(25)
        with open_trainer(model) as trainer:
            trainer.step(X[:16], y[:16])
            return trainer.fingerprint()

    assert trained((16, 9)) == by_hand()


def test_an_objective_that_needs_two_examples_is_left_to_its_step():
    def spread(model, X, y):
        assert len(X) > 1
        return nn.functional.cross_entropy(model(X), y)

    model = images()
    data = TensorDataset(*batch_of(41))
    with evenstep.Trainer(model, sgd(model), objective=spread, devices=1) as trainer:
        batches = trainer.epoch(DataLoader(data, 16))
        trainer.step(*next(batches))
        assert trainer.steps_done == 1
