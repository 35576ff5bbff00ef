"""What a trainer, a loss, an epoch and the shares of time show of themselves."""

import copy
import io
import json
import operator
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from tqdm import tqdm

import evenstep
from evenstep.data import Loader
from trainers import open_trainer
from zoo import build, make_batches

BATCHES = make_batches((24, 17, 24))


def data():
    return TensorDataset(torch.randn(42, 3), torch.zeros(42).long())


def small(**options):
    torch.manual_seed(0)
    return open_trainer(nn.Linear(3, 2), devices=1, **options)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


# ---- the length of an epoch


@pytest.mark.parametrize(
    "loader",
    [
        Loader(data(), 4, shuffle=True),
        DataLoader(data(), 4, shuffle=True),
        [(torch.randn(4, 3), torch.zeros(4).long())] * 11,
    ],
    ids=["evenstep", "torch", "list"],
)
def test_an_epoch_has_the_length_of_what_it_yields(loader, tmp_path):
    with small() as trainer:
        assert len(trainer.epoch(loader)) == len(list(trainer.epoch(loader))) == 11
        for number, (X, y) in enumerate(trainer.epoch(loader)):
            trainer.step(X, y)
            if number == 3:
                break
        rest = trainer.epoch(loader)
        assert len(rest) == 7
        assert next(rest)
        assert len(rest) == 7  # as of a sequence that one loops over
        assert len(list(rest)) == 6
        trainer.save(tmp_path)
        assert len(trainer.epoch(loader)) == 11


def test_a_resumed_epoch_has_the_length_of_its_rest(tmp_path):
    with small() as trainer:
        for X, y in trainer.epoch(Loader(data(), 4)):
            trainer.step(X, y)
            if trainer.steps_done == 2:
                break
        trainer.save(tmp_path)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with evenstep.Trainer.load(tmp_path, model, optimizer, nn.CrossEntropyLoss()) as trainer:
        assert len(trainer.epoch(Loader(data(), 4))) == 9


def test_tqdm_shows_how_much_is_left():
    shown = io.StringIO()
    with small() as trainer:
        for X, y in tqdm(trainer.epoch(DataLoader(data(), 4)), file=shown):
            trainer.step(X, y)
    assert "11/11" in shown.getvalue()


def test_an_epoch_of_a_stream_has_no_length():
    with small() as trainer:
        rest = trainer.epoch(DataLoader(Stream(), 4))
        with pytest.raises(TypeError, match="no length, because DataLoader has none"):
            len(rest)
        assert len(list(rest)) == 11


# ---- losses


def test_a_loss_shows_its_number():
    with open_trainer(build("convolution")) as trainer:
        losses = [trainer.step(X, y) for X, y in BATCHES]
    numbers = [float(loss) for loss in losses]
    assert repr(losses) == repr(numbers)
    assert f"{losses[0]:.3f}" == f"{numbers[0]:.3f}"
    assert json.dumps([*map(float, losses)]) == json.dumps(numbers)
    for refused in (json.dumps, torch.tensor):
        with pytest.raises((TypeError, RuntimeError), match=r"use float\(loss\)"):
            refused(losses)


def a_loss():
    with open_trainer(build("convolution"), max_in_flight=2) as trainer:
        return trainer.step(*BATCHES[0])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_loss_is_copied_and_hashed_as_its_number(copied):
    loss = a_loss()
    found = copied(loss)
    assert type(found) is float
    assert found == float(loss)
    assert hash(loss) == hash(float(loss))
    assert {loss, float(loss)} == {float(loss)}


def test_a_saved_loss_is_a_tensor_which_torch_loads_without_evenstep(tmp_path):
    """A program for inference may not have evenstep, and torch.load refuses foreign classes."""
    loss = a_loss()
    torch.save({"loss": loss, "history": [loss]}, tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    for one in (found["loss"], *found["history"], pickle.loads(pickle.dumps(loss))):
        assert (one.shape, one.dtype, one.item()) == ((), torch.float64, float(loss))


def test_a_loss_becomes_a_tensor_on_the_cpu_whatever_torchs_default_device_is():
    loss = a_loss()
    with torch.device("meta"):
        found = loss.detach(), loss.cpu(), torch.as_tensor(1.0, device="cpu") + loss
    assert all(one.device.type == "cpu" for one in found)


@pytest.mark.parametrize("name", ["lt", "le", "eq", "ne", "gt", "ge"])
def test_a_loss_is_compared_with_tensors_as_its_number_is(name):
    compare, loss = getattr(operator, name), a_loss()
    number = float(loss)
    values = torch.tensor([number - 1, number, number + 1])
    for ours, plain in (
        (compare(loss, values), compare(number, values)),
        (compare(values, loss), compare(values, number)),
    ):
        assert ours.dtype == torch.bool
        assert torch.equal(ours, plain)
    assert compare(loss, number) is compare(number, number)


# ---- the trainer, and its shares


def test_a_trainer_says_what_it_is():
    trainer = open_trainer(nn.Linear(3, 2), shards=4, seed=7)
    assert repr(trainer) == (
        "<Trainer of Linear with SGD on cpu:0, cpu:1: 4 shards, seed 7; 0 steps done, next is "
        "batch 0 of epoch 0; not open>"
    )
    with trainer:
        for X, y in trainer.epoch([*DataLoader(data(), 4)]):
            trainer.step(X, y)
            if trainer.steps_done == 2:
                assert "; 2 steps done, next is batch 2 of epoch 0>" in repr(trainer)


def test_shares_print_a_table():
    with open_trainer(build("convolution"), shards=4) as trainer:
        for X, y in BATCHES:
            trainer.step(X, y)
        shares = trainer.shares()
    head, *rows = str(shares).splitlines()
    assert head.split()[0] == "device"
    assert [row.split()[0] for row in rows] == ["cpu:0", "cpu:1"]
    assert len({len(row) for row in (head, *rows)}) == 1
    for row in rows:
        assert sum(int(cell[:-1]) for cell in row.split() if cell.endswith("%")) == 100
    assert sum(int(row.split()[-2]) for row in rows) == 4 * len(BATCHES)
