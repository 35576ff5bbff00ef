"""Small models that have, each, one thing that could make results depend on the layout."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

CLASSES = 5


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 7, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(7, CLASSES)

    def forward(self, x):
        return self.head(self.lstm(x.reshape(len(x), 6, 6))[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 11, dropout=0.2, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.layer(x.reshape(len(x), 6, 6)).mean(1))


class Tied(nn.Module):
    """One weight in two layers, under two names."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(36, 9)
        self.decode = nn.Linear(36, 9)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(9, CLASSES)

    def forward(self, x):
        x = x.flatten(1)
        return self.head(torch.tanh(self.encode(x)) * torch.sigmoid(self.decode(x)))


class Unused(nn.Module):
    """A parameter that nothing touches, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.never = nn.Linear(3, 3)
        self.frozen = nn.Linear(36, 8).requires_grad_(False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(torch.relu(self.frozen(x.flatten(1))))


class Branching(nn.Module):
    """A branch that only some shards take (those whose first example is positive)."""

    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(36, CLASSES), nn.Linear(36, CLASSES)
        self.register_buffer("visits", torch.zeros(()))
        self.register_buffer("constant", torch.rand(3))

    def forward(self, x):
        x = x.flatten(1)
        if x[0, 0] > 0:
            self.visits += 0.1
            return self.high(x)
        return self.low(x)


class MixedDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.coarse = nn.Linear(36, 8, dtype=torch.bfloat16)
        self.fine = nn.Linear(8, CLASSES, dtype=torch.float64)
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.counter += len(x)
        return self.fine(torch.relu(self.coarse(x.flatten(1).bfloat16())).double()).float()


class Noisy(nn.Module):
    """Random ops of every kind: with a generator argument, without, in place, as factories."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x):
        x = x.flatten(1)
        x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.rand(36, device=x.device)
        x = x[:, torch.randperm(36, device=x.device)] * torch.empty_like(x[0]).uniform_(0.5, 1.5)
        return self.head(nn.functional.dropout(x, 0.25, self.training))


class SparseInPlaces(nn.Module):
    """A table with sparse gradients, which some shards use densely."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 5, sparse=True)

    def forward(self, x):
        tokens = (x.flatten(1) * 2).long().clamp(-4, 4) + 4
        if x.flatten()[0] > 0:
            return self.table(tokens).mean(1)
        return nn.functional.one_hot(tokens, 9).float().mean(1) @ self.table.weight


class Momentum(nn.Module):
    """A model with an encoder that follows another one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(36, 8), nn.Linear(36, 8).requires_grad_(False)
        self.head = nn.Linear(16, 5)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        x = x.flatten(1)
        return self.head(torch.cat([self.norm(self.query(x)), self.key(x)], 1).tanh())


@torch.no_grad()
def follow(model):
    """Let the slow encoder follow, after an update."""
    for slow, fast in zip(model.key.parameters(), model.query.parameters(), strict=True):
        slow.lerp_(fast, 0.3)
    model.updates += 1


class Recomputed(nn.Module):
    """A layer in two recomputed parts: one backward pass adds to its gradient twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(36, 36), nn.Linear(36, CLASSES)

    def forward(self, x):
        hidden = x.flatten(1).requires_grad_()
        for _ in range(2):
            hidden = checkpoint(lambda h: self.layer(h).tanh(), hidden, use_reentrant=True)
        return self.head(hidden)


def batch_norm():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)
    )


def dropout():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, CLASSES)
    )


def convolution():
    return nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(20, CLASSES)
    )


ZOO = {
    "convolution": convolution,
    "batch_norm": batch_norm,
    "dropout": dropout,
    "recurrent": Recurrent,
    "attention": Attention,
    "tied": Tied,
    "unused": Unused,
    "branching": Branching,
    "mixed_dtypes": MixedDtypes,
    "noisy": Noisy,
}


def build(name, seed=0):
    torch.manual_seed(seed)
    return ZOO[name]()


OPTIONS = {
    Branching: {"separable": False},
    SparseInPlaces: {"separable": False},
    MixedDtypes: {"buffers": {"counter": "first"}},
}


def options_of(model):
    """Return the options that `Trainer` needs for a model."""
    return OPTIONS.get(type(model), {})


def make_batches(sizes, seed=1):
    """Return (X, y) batches: X float (n, 1, 6, 6), y int64 (n,) below CLASSES."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 1, 6, 6, generator=generator),
            torch.randint(0, CLASSES, (size,), generator=generator),
        )
        for size in sizes
    ]
