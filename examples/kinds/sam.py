"""SAM: the gradient is that of a nearby point, where the loss is larger."""

import torch
from torch import nn

import evenstep


@torch.no_grad()
def climb(model, radius=0.05):
    """Move the parameters along their gradients; return the way."""
    scale = radius / nn.utils.get_total_norm([one.grad for one in model.parameters()])
    way = [one.grad * scale for one in model.parameters()]
    for one, step in zip(model.parameters(), way, strict=True):
        one.add_(step)
    return way


@torch.no_grad()
def climb_down(model, way):
    for one, step in zip(model.parameters(), way, strict=True):
        one.sub_(step)


def batches(steps):
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        X = torch.randn(64, 16, generator=random)
        yield X, X[:, :4].argmax(1)


def plain(steps=6):
    torch.manual_seed(0)
    model, losses = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loss_function = nn.CrossEntropyLoss()
    for X, y in batches(steps):
        optimizer.zero_grad()
        loss = loss_function(model(X), y)
        loss.backward()
        way = climb(model)
        optimizer.zero_grad()
        loss_function(model(X), y).backward()
        climb_down(model, way)
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


def even(devices="auto", shards=8, steps=6):
    torch.manual_seed(0)
    model, losses = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    loss_function = nn.CrossEntropyLoss()
    options = {"devices": devices, "shards": shards}
    with evenstep.Trainer(model, optimizer, loss_function, **options) as trainer:
        for X, y in batches(steps):
            loss = trainer.backward(X, y)
            way = climb(model)
            trainer.backward(X, y)
            climb_down(model, way)
            optimizer.step()
            losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
