"""Unusual layers, parametrizations, dtypes and optimizers."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import spectral_norm as hooked_spectral_norm
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from good_models.recipe import ADAM, Recipe, images, mlp, summed, trainable, vectors

CROSS_ENTROPY = nn.CrossEntropyLoss()
WIDTH, CLASSES = 6, 5


def classifier(first=None):
    return nn.Sequential(first or nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def parametrized(parametrize):
    return lambda: classifier(parametrize(nn.Linear(WIDTH, 8)))


class Checkpointed(nn.Module):
    """Activations are computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.tail = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(lambda h, block=block: block(h).relu(), x, use_reentrant=False)
        return self.head(checkpoint_sequential(self.tail, 2, x, use_reentrant=False))


class CheckpointedReentrantly(nn.Module):
    """A backward pass inside the backward pass, from inputs that require a gradient."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda h: self.layer(h).tanh(), x, use_reentrant=True)
        return self.head(x)


class TiedAutoencoder(nn.Module):
    """One weight, used forwards and transposed, and listed under two names."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 3)
        self.copy, self.bias = self.encoder, nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return self.encoder(x).tanh() @ self.copy.weight + self.bias


class Mixture(nn.Module):
    """Weights in a ParameterList, layers in a ModuleDict, one of which is not used."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(()) for _ in range(2))
        self.experts = nn.ModuleDict({
            name: nn.Linear(WIDTH, CLASSES) for name in ("low", "high", "unused")
        })  # fmt: skip

    def forward(self, x):
        return sum(weight * self.experts[name](x) for weight, name in zip(
            self.weights, ("low", "high"), strict=True))  # fmt: skip


class Scaled(nn.Module):
    """Divides by a running mean of magnitudes, and counts its calls, both in buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.scale.lerp_(x.detach().abs().mean(0), 0.1)
            self.calls += 1
        return x / self.scale


class Centred(nn.Module):
    """Subtracts a running mean, which each call replaces by another tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class FixedFeatures(nn.Module):
    """The same random features in every call, and a mask made by numpy."""

    def forward(self, x):
        generator = torch.Generator().manual_seed(3)
        features = torch.randn(WIDTH, WIDTH, generator=generator, dtype=x.dtype)
        return (x @ features).cos() * torch.from_numpy(np.linspace(0.5, 1, WIDTH, dtype="f"))


class FourierLayer(nn.Module):
    """Complex weights on the lowest frequencies (Fourier neural operator, 2020)."""

    def __init__(self, width=3, modes=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width)

    def forward(self, x):
        low = torch.fft.rfft(x)[..., : self.weight.shape[-1]]
        return x + torch.fft.irfft(torch.einsum("bik,iok->bok", low, self.weight), n=x.shape[-1])


def fourier_operator():
    return nn.Sequential(nn.Conv1d(1, 3, 1), FourierLayer(), nn.GELU(), FourierLayer(),
                         nn.Conv1d(3, 1, 1))  # fmt: skip


class Sign(torch.autograd.Function):
    """The sign, with the gradient of a clamp (BinaryConnect, 2015)."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 1)


class BinaryLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, Sign.apply(self.weight), self.bias)


class BayesianLinear(nn.Module):
    """Weights drawn in each forward pass; keeps its divergence for the objective."""

    def __init__(self, ins, outs):
        super().__init__()
        self.mean = nn.Parameter(torch.randn(outs, ins) / ins**0.5)
        self.log_spread = nn.Parameter(torch.full((outs, ins), -3.0))

    def forward(self, x):
        spread = self.log_spread.exp()
        self.divergence = (self.mean**2 + spread**2 - 2 * self.log_spread - 1).sum() / 2
        return F.linear(x, self.mean + spread * torch.randn_like(spread))


def evidence(model, X, y):
    losses = F.cross_entropy(model(X), y, reduction="none")
    divergence = sum(one.divergence for one in model if isinstance(one, BayesianLinear))
    return summed(losses + divergence / 1000)


class LookedAt(nn.Module):
    """Keeps attention weights, features and a number of calls, for somebody to look at."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, CLASSES)
        self.weights, self.features, self.calls = None, {}, 0
        self.attention.register_forward_hook(self.keep)

    def keep(self, module, inputs, output):
        self.features["attention"] = output[0].detach()

    def forward(self, x):
        self.calls += 1
        mixed, self.weights = self.attention(x, x, x)
        return self.head(mixed.mean(1))


class Lazy(nn.Module):
    """Layers that take their width from a first batch, given at construction."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(8), nn.PReLU(), nn.LazyLinear(CLASSES))
        self.layers(torch.zeros(1, WIDTH))

    def forward(self, x):
        return self.layers(x)


class Graphs(nn.Module):
    """Graph convolutions on dense adjacency matrices (Kipf and Welling, 2016)."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, CLASSES)

    def forward(self, graphs):
        nodes, edges = graphs
        edges = edges + torch.eye(edges.shape[1])
        scale = edges.sum(2, keepdim=True).rsqrt()
        for layer in self.layers:
            nodes = (scale * edges * scale.mT @ layer(nodes)).relu()
        return self.head(nodes.mean(1))


def graphs(n):
    edges = (torch.rand(n, 5, 5) < 0.4).float().triu(1)
    return (torch.randn(n, 5, 3), edges + edges.mT), torch.randint(CLASSES, (n,))


class HyperNetwork(nn.Module):
    """A network that gives another one its weights, for each example."""

    def __init__(self):
        super().__init__()
        self.maker, self.last = mlp(2, 8, 4 * 3), nn.Linear(3, CLASSES)

    def forward(self, x):
        condition, source = x.split((2, 4), 1)
        weights = self.maker(condition).view(-1, 3, 4)
        return self.last(torch.vmap(torch.mv)(weights, source).relu())


def frozen_start():
    model = classifier()
    model[0].requires_grad_(False)
    return model


def noisy_layers():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Dropout2d(0.2), nn.RReLU(), nn.FractionalMaxPool2d(2, 3),
        nn.Flatten(), nn.AlphaDropout(0.1), nn.Linear(36, CLASSES),
    )  # fmt: skip


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def doubles(n):
    X = torch.rand(n, 1, dtype=torch.float64) * 6
    return X, X.sin()


def waves(n):
    return torch.randn(n, 1, 8), torch.randn(n, 1, 8)


def copies(n):
    X = torch.randn(n, WIDTH)
    return X, X


LAYERS = {
    "spectral norm": Recipe(
        parametrized(parametrizations.spectral_norm), vectors(), CROSS_ENTROPY),
    "spectral norm by a hook": Recipe(
        parametrized(hooked_spectral_norm), vectors(), CROSS_ENTROPY),
    "weight norm": Recipe(parametrized(parametrizations.weight_norm), vectors(), CROSS_ENTROPY),
    "orthogonal weight": Recipe(
        parametrized(parametrizations.orthogonal), vectors(), CROSS_ENTROPY),
    "checkpointed activations": Recipe(Checkpointed, vectors(), CROSS_ENTROPY),
    "checkpointed reentrantly": Recipe(CheckpointedReentrantly, vectors(), CROSS_ENTROPY),
    "tied autoencoder": Recipe(TiedAutoencoder, copies, nn.MSELoss()),
    "parameters in lists": Recipe(Mixture, vectors(), CROSS_ENTROPY),
    "running statistic": Recipe(
        lambda: nn.Sequential(Scaled(), classifier()), vectors(), CROSS_ENTROPY),
    "replaced buffer": Recipe(
        lambda: nn.Sequential(Centred(), classifier()), vectors(), CROSS_ENTROPY),
    "fixed random features": Recipe(
        lambda: nn.Sequential(FixedFeatures(), classifier()), vectors(), CROSS_ENTROPY),
    "complex weights": Recipe(fourier_operator, waves, nn.MSELoss(), make_optimizer=ADAM),
    "float64": Recipe(
        lambda: mlp(1, 8, 1).double(), doubles, nn.MSELoss(), make_optimizer=ADAM),
    "bfloat16 weights": Recipe(
        lambda: classifier().bfloat16(),
        lambda n: (torch.randn(n, WIDTH).bfloat16(), torch.randint(CLASSES, (n,))),
        CROSS_ENTROPY),
    "autocast": Recipe(
        noisy_layers, images(), CROSS_ENTROPY, options={"precision": "bf16"}),
    "one shard": Recipe(
        classifier, vectors(), CROSS_ENTROPY, options={"shards": 1}, unjudged="one shard"),
    "synchronised batch norm": Recipe(
        lambda: classifier(nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8))), vectors(),
        CROSS_ENTROPY, options={"batch_norm": "sync"}),
    "binary weights": Recipe(
        lambda: classifier(BinaryLinear(WIDTH, 8)), vectors(), CROSS_ENTROPY),
    "bayesian layers": Recipe(
        lambda: nn.Sequential(BayesianLinear(WIDTH, 8), nn.ReLU(), BayesianLinear(8, CLASSES)),
        vectors(), objective=evidence, make_optimizer=ADAM),
    "kept activations": Recipe(
        LookedAt, lambda n: (torch.randn(n, 5, 4), torch.randint(CLASSES, (n,))), CROSS_ENTROPY),
    "lazy layers": Recipe(Lazy, vectors(), CROSS_ENTROPY),
    "graph convolution": Recipe(Graphs, graphs, CROSS_ENTROPY, make_optimizer=ADAM),
    "hypernetwork": Recipe(HyperNetwork, vectors(), CROSS_ENTROPY),
    "frozen layers": Recipe(
        frozen_start, vectors(), CROSS_ENTROPY, make_optimizer=trainable(ADAM)),
    "noisy layers": Recipe(noisy_layers, images(), CROSS_ENTROPY),
    "two threads": Recipe(
        lambda: mlp(64, 64, CLASSES), vectors(64), CROSS_ENTROPY, options={"threads": 2}),
    "clipped gradients": Recipe(
        classifier, vectors(), CROSS_ENTROPY, options={"before_update": clip}),
    "lbfgs": Recipe(classifier, vectors(), CROSS_ENTROPY, make_optimizer=lbfgs),
}  # fmt: skip
