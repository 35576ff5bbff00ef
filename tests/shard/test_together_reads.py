"""Shards computed at once, whose code begins to read their numbers past torch's operations."""

import numpy as np
import pytest
import torch
from torch import nn

from evenstep.arithmetic.together import NotTogetherError, of_shards
from evenstep.shard.together import Together, refused_reads, watched_reads
from reference import assert_same_bits
from trainers import open_trainer

STEPS, V = 12, 8


READS = {  # each is a number for each example
    "numpy": lambda h: torch.from_numpy(abs(h.detach().numpy()).max(1)),
    "asarray": lambda h: torch.from_numpy(np.asarray(h.detach()).sum(1)),
    "tolist": lambda h: torch.tensor([max(row) for row in h.tolist()]),
    "dlpack": lambda h: torch.from_numpy(np.from_dlpack(h.detach()).max(1)),
}


class Reading(nn.Module):
    """Two layers; between them a function that is used from some step on."""

    def __init__(self, read, begins):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 4)
        self.read, self.begins, self.step = read, begins, 0

    def forward(self, x):
        h = self.first(x).tanh()
        return self.second(h * self.read(h)[:, None] if self.step >= self.begins else h)


def batches():
    drawn = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        yield torch.randn(16, 6, generator=drawn), torch.randint(4, (16,), generator=drawn)


def made(read, begins):
    torch.manual_seed(0)
    model = Reading(read, begins)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def plain(read, begins):
    """Train by a loop of torch over the shards; return the losses."""
    model, optimizer = made(read, begins)
    losses = []
    for model.step, (X, y) in enumerate(batches()):
        optimizer.zero_grad()
        total = 0.0
        for x, target in zip(X.chunk(V), y.chunk(V), strict=True):
            loss = nn.functional.cross_entropy(model(x), target, reduction="sum") / len(X)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return losses


def trained(read, begins, devices):
    """Train in portable arithmetic; return the losses and the parameters."""
    model, optimizer = made(read, begins)
    options = {"optimizer": optimizer, "devices": devices, "arithmetic": "portable", "shards": V}
    losses = []
    with open_trainer(model, **options) as trainer:
        for model.step, (X, y) in enumerate(batches()):
            losses.append(float(trainer.step(X, y)))
    return losses, model.state_dict()


@pytest.mark.parametrize("begins", [2, 5])
@pytest.mark.parametrize("read", READS)
def test_each_shard_reads_its_own_numbers(read, begins, monkeypatch):
    found = [trained(READS[read], begins, devices) for devices in (1, 2)]
    monkeypatch.setattr(Together, "runs", lambda *_: {})
    losses, expected = trained(READS[read], begins, 1)
    assert losses == pytest.approx(plain(READS[read], begins), rel=1e-4)
    for own, state in found:
        assert own == losses
        assert_same_bits(state, expected)


@pytest.mark.parametrize("owner", [torch, torch.Tensor])
def test_a_cut_at_numbers_of_each_shard_is_refused(owner):
    places = of_shards(torch.tensor([[1], [2]]), 2)
    with watched_reads():
        with refused_reads(), pytest.raises(NotTogetherError, match="tensor_split"):
            owner.tensor_split(torch.ones(4), places)
        assert len(owner.tensor_split(torch.ones(4), places)) == 2


def test_afterwards_torchs_functions_are_what_they_were():
    names = ("numpy", "tolist", "__dlpack__", "tensor_split")
    before = [*(getattr(torch.Tensor, name) for name in names), torch.tensor_split]
    own = {name for name in names if name in vars(torch.Tensor)}
    trained(READS["numpy"], 2, 2)
    assert [*(getattr(torch.Tensor, name) for name in names), torch.tensor_split] == before
    assert {name for name in names if name in vars(torch.Tensor)} == own
