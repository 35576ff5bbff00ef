"""Every torch optimizer, with settings and a model that it takes."""

import inspect

import torch
from torch import nn

from zoo import build

SETTINGS = {
    torch.optim.SGD: {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    torch.optim.LBFGS: {"lr": 0.1, "max_iter": 4},
}
OPTIMIZERS = [
    cls
    for _, cls in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
]


def matrices():
    """A model of which every parameter is a matrix (Muon takes no other)."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 12, bias=False), nn.Tanh(), nn.Linear(12, 5, bias=False)
    )


def embedding():
    """A model with sparse gradients (SparseAdam takes no other): tokens are cells of the image."""
    torch.manual_seed(0)
    return Tokens()


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 5, sparse=True)

    def forward(self, x):
        return self.table((x.flatten(1) * 3).long().clamp(-4, 4) + 4).mean(1)


def model_for(cls):
    if cls is torch.optim.SparseAdam:
        return embedding()
    return matrices() if cls.__name__ == "Muon" else build("convolution")
