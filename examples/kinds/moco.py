"""MoCo: a momentum encoder makes the keys, and a queue keeps those of earlier batches."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import evenstep


class MoCo(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(128, 8)))

    def forward(self, one, other):
        return F.normalize(self.query(one)), F.normalize(self.key(other))


@torch.no_grad()
def follow(model):
    for key, query in zip(model.key.parameters(), model.query.parameters(), strict=True):
        key.lerp_(query, 0.05)


@torch.no_grad()
def enqueue(model, keys):
    model.queue.copy_(torch.cat([keys, model.queue[: -len(keys)]]))


def loss_of(model, one, other):
    queries, keys = model(one, other)
    right = (queries * keys).sum(1, keepdim=True)
    scores = torch.cat([right, queries @ model.queue.T], 1) / 0.2
    return F.cross_entropy(scores, torch.zeros(len(one), dtype=torch.int64)), {"keys": keys}


def batches(steps):
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        images = torch.randn(32, 32, generator=random)
        yield [images + 0.1 * torch.randn(32, 32, generator=random) for _ in range(2)]


def plain(steps=6):
    torch.manual_seed(0)
    model, losses = MoCo(), []
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1, momentum=0.9)
    for views in batches(steps):
        optimizer.zero_grad()
        loss, outputs = loss_of(model, *views)
        loss.backward()
        optimizer.step()
        follow(model)
        enqueue(model, outputs["keys"])
        losses.append(loss.item())
    return model, optimizer, losses


def even(devices="auto", shards=8, steps=6):
    torch.manual_seed(0)
    model, losses = MoCo(), []
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1, momentum=0.9)
    options = {"devices": devices, "shards": shards}
    with evenstep.Trainer(model, optimizer, objective=loss_of, **options) as trainer:
        for views in batches(steps):
            loss = trainer.step(*views)
            follow(model)
            enqueue(model, loss.outputs["keys"])
            losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
