"""Schedule-free SGD: the gradient is taken between the last point and the mean of all points."""

import torch
from torch import nn

import evenstep


class ScheduleFree(torch.optim.Optimizer):
    """Defazio et al., 2024. In `train` mode the parameters are where gradients are taken."""

    def __init__(self, parameters, lr, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta, "steps": 0, "is_training": True})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for one in group["params"]:
                state = self.state[one]
                if not state:
                    state["last"], state["mean"] = one.clone(), one.clone()
                state["last"].sub_(one.grad, alpha=group["lr"])
                state["mean"].lerp_(state["last"], 1 / group["steps"])
                one.copy_(state["last"].lerp(state["mean"], group["beta"]))

    @torch.no_grad()
    def mode(self, is_training):
        for group in self.param_groups:
            for one in group["params"] if group["is_training"] != is_training else []:
                state = self.state[one]
                between = state["last"].lerp(state["mean"], group["beta"])
                one.copy_(between if is_training else state["mean"])
            group["is_training"] = is_training


def batches(steps):
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        X = torch.randn(64, 16, generator=random)
        yield X, X[:, :4].argmax(1)


def plain(steps=6):
    torch.manual_seed(0)
    model, losses = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), []
    optimizer, loss_function = ScheduleFree(model.parameters(), 0.5), nn.CrossEntropyLoss()
    for X, y in batches(steps):
        optimizer.zero_grad()
        loss = loss_function(model(X), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.mode(is_training=False)
    return model, optimizer, losses


def even(devices="auto", shards=8, steps=6):
    torch.manual_seed(0)
    model, losses = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), []
    optimizer, loss_function = ScheduleFree(model.parameters(), 0.5), nn.CrossEntropyLoss()
    options = {"devices": devices, "shards": shards}
    with evenstep.Trainer(model, optimizer, loss_function, **options) as trainer:
        for X, y in batches(steps):
            loss = trainer.step(X, y)
            losses.append(loss.item())
        optimizer.mode(is_training=False)
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
