"""Models whose gradients autograd puts into shared memory: views of one tensor, kept buffers."""

import threading
from collections import OrderedDict

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from zoo import CLASSES


def parameter(*shape, dtype=None):
    return nn.Parameter(0.1 * torch.randn(shape, dtype=dtype))


class Positions(nn.Module):
    """Two tables of positions, whose gradients are views of one tensor."""

    def __init__(self):
        super().__init__()
        self.rows, self.columns = parameter(6, 6), parameter(6, 6)
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x):
        return self.head(torch.tanh(x.flatten(1) + (self.rows.flatten() + self.columns.flatten())))


class ResidualBias(nn.Module):
    """A bias added to a residual stream: its gradient is a view of what goes on backwards."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(36, 36), nn.Linear(36, 36)
        self.bias, self.other = parameter(36), parameter(36)
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x):
        x = self.first(x.flatten(1))
        x = x + self.second(torch.tanh(x)) + self.bias.view(1, -1)
        x = x + torch.sin(x) + self.other.view(1, -1).expand_as(x)
        return self.head(x)


class RelativePositions(nn.Module):
    """Attention with a bias for each pair of positions, of two parts."""

    def __init__(self):
        super().__init__()
        self.to_keys = nn.Linear(6, 18)
        self.near, self.far = parameter(6, 6), parameter(6, 6)
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x):
        query, key, value = self.to_keys(x[:, 0]).chunk(3, -1)
        bias = (self.near + self.far).unsqueeze(0)
        weights = torch.softmax(query @ key.mT + bias, -1)
        return self.head((weights @ value).flatten(1))


class MergedLora(nn.Module):
    """A low-rank change that is added to a weight before the product."""

    def __init__(self):
        super().__init__()
        self.weight, self.down, self.up = parameter(36, 36), parameter(2, 36), parameter(36, 2)
        self.offset = parameter(36, 36)
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x):
        merged = self.weight + self.up @ self.down + self.offset
        return self.head(F.linear(x.flatten(1), merged).tanh())


class Normed(nn.Module):
    """Layers with weight normalisation and with an orthogonal weight."""

    def __init__(self):
        super().__init__()
        self.layer = parametrizations.weight_norm(nn.Linear(36, 9))
        self.turn = parametrizations.orthogonal(nn.Linear(9, 9))
        self.head = parametrizations.spectral_norm(nn.Linear(9, CLASSES))

    def forward(self, x):
        return self.head(self.turn(self.layer(x.flatten(1))).tanh())


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 7, num_layers=2, bidirectional=True, batch_first=True)
        self.state = parameter(4, 7)
        self.head = nn.Linear(14, CLASSES)

    def forward(self, x):
        state = self.state.unsqueeze(1).expand(-1, len(x), -1).contiguous()
        return self.head(self.lstm(x[:, 0], (state, state))[0][:, -1])


class Scales(nn.Module):
    """Numbers that are expanded to a whole layer: their gradients come from stride 0."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.row = parameter(), parameter(1), parameter(1, 36)
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x):
        x = x.flatten(1)
        x = x + self.one.expand_as(x) + self.two.expand(36) + self.row.expand_as(x)
        return self.head(x) + (self.one + self.two).expand(CLASSES)


class ComplexFilter(nn.Module):
    """Complex parameters: gradients that are views as real numbers, and lazy conjugates."""

    def __init__(self):
        super().__init__()
        self.filter = parameter(6, 4, dtype=torch.complex64)
        self.shift, self.turn = parameter(6, 4, dtype=torch.complex64), parameter(24, 2)
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x):
        turn = torch.view_as_complex(self.turn).view(6, 4)
        waves = torch.fft.rfft2(x[:, 0]) * (self.filter.conj() + self.shift + turn)
        return self.head(torch.fft.irfft2(waves, (6, 6)).flatten(1))


class Concatenated(nn.Module):
    """Parameters that are parts of one weight: their gradients are parts of one tensor."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList([parameter(3, 36) for _ in range(3)])
        self.head = nn.Linear(9, CLASSES)

    def forward(self, x):
        return self.head(F.linear(x.flatten(1), torch.cat([*self.parts])).tanh())


class SparseSums(nn.Module):
    """Two tables whose sparse gradients have the same values, and a bias that shares them too."""

    def __init__(self):
        super().__init__()
        self.words, self.places = (nn.Embedding(9, 4, sparse=True) for _ in range(2))
        self.bias = parameter(36, 4)
        self.head = nn.Linear(144, CLASSES)

    def forward(self, x):
        words = (x.flatten(1) * 2).long().clamp(-4, 4) + 4
        found = self.words(words) + self.places(words.flip(1)) + self.bias
        return self.head(found.flatten(1))


_OF_THREAD = threading.local()


class _KeepsGradient(torch.autograd.Function):
    """Returns its gradient in an array of numpy, which it uses again in each backward pass."""

    @staticmethod
    def forward(ctx, row):
        return row.clone()

    @staticmethod
    def backward(ctx, gradient):
        if not hasattr(_OF_THREAD, "memory"):
            _OF_THREAD.memory = np.zeros(36, dtype=np.float32)
        _OF_THREAD.memory[:] = gradient.numpy()
        return torch.from_numpy(_OF_THREAD.memory)


class Hooked(nn.Module):
    """Hooks on activations and a custom function that return memory which they keep."""

    def __init__(self):
        super().__init__()
        self.row, self.bias = parameter(36), parameter(36)
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x):
        kept = []

        def keep(gradient):
            kept.append(gradient)  # the hook's own reference, for as long as the graph lives
            return gradient

        row = self.bias.view(36) + _KeepsGradient.apply(self.row)
        row.register_hook(keep)
        return self.head((x.flatten(1) + row).tanh())


class FlatParameters(nn.Module):
    """Two parameters in one buffer, side by side."""

    def __init__(self):
        super().__init__()
        flat = 0.1 * torch.randn(72)
        self.left, self.right = (nn.Parameter(part) for part in flat.split(36))
        self.head = nn.Linear(36, CLASSES)

    def forward(self, x):
        return self.head((x.flatten(1) * self.left + (self.right + self.left)).tanh())


SHARING = {
    model.__name__: model
    for model in (Positions, ResidualBias, RelativePositions, MergedLora, Normed, Lstm, Scales,
                  ComplexFilter, Concatenated, SparseSums, Hooked, FlatParameters)
}  # fmt: skip


def build_sharing(name):
    """Return a model with a layer before it, so that it can be divided into stages."""
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(first=nn.Linear(6, 6), body=SHARING[name]()))


def stages_of_sharing(name):
    return {"first": 0, "body.second" if name == "ResidualBias" else "body.head": 1}
