"""BYOL: a network learns to predict what an average of itself makes of another view."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import evenstep


class Byol(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(
            nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)
        )
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))

    def forward(self, view):
        return self.predictor(self.online(view)), self.target(view)


@torch.no_grad()
def follow(model):
    for slow, fast in zip(model.target.parameters(), model.online.parameters(), strict=True):
        slow.lerp_(fast, 0.05)


def loss_of(model, one, other):
    (guess, code), (other_guess, other_code) = model(one), model(other)
    alike = F.cosine_similarity(guess, other_code) + F.cosine_similarity(other_guess, code)
    return (2 - alike).mean()


def batches(steps):
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        images = torch.randn(64, 32, generator=random)
        yield [images + 0.3 * torch.randn(64, 32, generator=random) for _ in range(2)]


def plain(steps=6):
    torch.manual_seed(0)
    model, losses = Byol(), []
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad])
    for views in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model, *views)
        loss.backward()
        optimizer.step()
        follow(model)
        losses.append(loss.item())
    return model, optimizer, losses


def even(devices="auto", shards=8, steps=6):
    torch.manual_seed(0)
    model, losses = Byol(), []
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad])
    options = {"devices": devices, "shards": shards, "after_update": follow}
    with evenstep.Trainer(model, optimizer, objective=loss_of, **options) as trainer:
        for views in batches(steps):
            loss = trainer.step(*views)
            losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
