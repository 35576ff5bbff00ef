"""Distillation: a small network learns from the soft answers of a large one."""

import torch
import torch.nn.functional as F
from torch import nn

import evenstep


def networks():
    teacher = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    return teacher.eval().requires_grad_(False), nn.Linear(16, 4)


def loss_of(teacher, model, X, y):
    with torch.no_grad():
        wanted = (teacher(X) / 2).log_softmax(1)
    scores = model(X)
    soft = F.kl_div((scores / 2).log_softmax(1), wanted, reduction="batchmean", log_target=True)
    return 4 * soft + 0.5 * F.cross_entropy(scores, y)


def batches(steps):
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        X = torch.randn(64, 16, generator=random)
        yield X, X[:, :4].argmax(1)


def plain(steps=6):
    torch.manual_seed(0)
    (teacher, model), losses = networks(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for X, y in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(teacher, model, X, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


def even(devices="auto", shards=8, steps=6):
    torch.manual_seed(0)
    (teacher, model), losses = networks(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"devices": devices, "shards": shards}
    options["objective"] = lambda model, X, y: loss_of(teacher, model, X, y)
    with evenstep.Trainer(model, optimizer, **options) as trainer:
        for X, y in batches(steps):
            loss = trainer.step(X, y)
            losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
