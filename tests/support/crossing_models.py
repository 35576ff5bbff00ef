"""Models whose tensors are used in several stages, written to, recomputed or used again."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zoo import CLASSES


class Skips(nn.Module):
    """A tensor that is used before the cut, after it, and by two modules there; dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(36, 12)
        self.early = nn.Linear(12, 12)
        self.late = nn.Linear(12, 12)
        self.later = nn.Linear(12, 12)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x):
        x = self.stem(x.flatten(1)).tanh()
        y = self.drop(x + self.early(x))
        z = self.late(y) * self.later(y).sigmoid() + x  # x is not passed to a module
        return self.head(self.drop(z) + y)


class Passing(nn.Module):
    """Passes every module a list that it appends to, and a tensor that it writes to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.late = nn.Linear(36, 12), Writing()
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x):
        x = self.stem(x.flatten(1)).tanh()
        found, scale = [x], torch.ones(12, device=x.device)
        x = self.late(x, {"found": found}, scale=scale)
        return self.head((x + sum(found)) * scale)


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x, kept, scale):
        x = self.layer(x)
        kept["found"].append(x.sin())
        scale.mul_(0.5)
        return x


class Gated(nn.Module):
    """Uses its input more than once."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x):
        return self.layer(x) * x + x.sigmoid()


class Fanned(nn.Module):
    """A tensor that several modules of both later stages get, which each use it more than once."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(36, 12)
        self.one, self.two, self.three, self.four = (Gated() for _ in range(4))
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x):
        x = self.stem(x.flatten(1)).tanh()
        y = self.one(x) + self.two(x)
        return self.head(self.four(self.three(y)) * self.four(self.three(x)))


class Checkpointed(nn.Module):
    """Layers that are recomputed, with dropout; one region reaches over a cut."""

    def __init__(self, *, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.one, self.two, self.three = nn.Linear(36, 9), nn.Linear(9, 9), nn.Linear(9, 9)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(9, CLASSES)

    def forward(self, x):
        hidden = self.one(x.flatten(1))
        hidden = checkpoint(self.block, hidden, use_reentrant=self.reentrant)
        return self.head(hidden)

    def block(self, x):
        return self.three(self.drop(self.two(x).tanh())).tanh()


class Taught(nn.Module):
    """A layer that gets one tensor twice: first without gradients, as a teacher, then with them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.late = nn.Linear(36, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x):
        x = self.stem(x.flatten(1))
        with torch.no_grad():
            wanted = self.late(x)
        return self.head(self.late(x).tanh() + wanted)
