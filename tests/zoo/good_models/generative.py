"""Models that learn to make data, and models of distributions."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from good_models.recipe import ADAM, Recipe, mlp, summed, trainable

WIDTH = 6


def pictures(n):
    return (torch.rand(n, 1, 8, 8),)


def points(n):
    return (torch.randn(n, WIDTH),)


def autoencoder():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 2, 3, 2, 1), nn.ReLU(),
        nn.ConvTranspose2d(2, 4, 2, 2), nn.ReLU(), nn.ConvTranspose2d(4, 1, 2, 2), nn.Sigmoid(),
    )  # fmt: skip


def reconstruction(model, X):
    return F.mse_loss(model(X), X, reduction="sum"), X.numel()


class VAE(nn.Module):
    """Draws by reparameterisation (Kingma and Welling, 2013)."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = mlp(64, 12, 8), mlp(4, 12, 64)

    def forward(self, x):
        mean, log_variance = self.encoder(x.flatten(1)).chunk(2, 1)
        code = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        return self.decoder(code).view_as(x), mean, log_variance


def evidence(model, X):
    logits, mean, log_variance = model(X)
    fit = F.binary_cross_entropy_with_logits(logits, X, reduction="sum")
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
    return fit + divergence, len(X)


class VQVAE(nn.Module):
    """The nearest of eight codes, with gradients straight through (van den Oord, 2017)."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = mlp(WIDTH, 8, 3), mlp(3, 8, WIDTH)
        self.codes = nn.Embedding(8, 3)

    def forward(self, x):
        found = self.encoder(x)
        code = self.codes(torch.cdist(found, self.codes.weight).argmin(1))
        return self.decoder(found + (code - found).detach()), found, code


def quantised(model, X):
    output, found, code = model(X)
    losses = (output - X).square().mean(1)
    losses = losses + (code - found.detach()).square().mean(1)
    return summed(losses + 0.25 * (found - code.detach()).square().mean(1))


class GumbelVAE(nn.Module):
    """Discrete codes, drawn with Gumbel noise."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = mlp(WIDTH, 8, 5), mlp(5, 8, WIDTH)

    def forward(self, x):
        return self.decoder(F.gumbel_softmax(self.encoder(x), tau=0.7, hard=True))


class Denoiser(nn.Module):
    """Predicts the noise in x at time t."""

    def __init__(self, times=20):
        super().__init__()
        self.times, self.net = nn.Embedding(times, 4), mlp(WIDTH + 4, 16, WIDTH)
        kept = (1 - torch.linspace(1e-4, 0.1, times)).cumprod(0)
        self.register_buffer("kept", kept)

    def forward(self, x, t):
        return self.net(torch.cat([x, self.times(t)], 1))


def ddpm(model, X):
    """Algorithm 1 of Ho et al., 2020."""
    t = torch.randint(len(model.kept), (len(X),), device=X.device)
    noise = torch.randn_like(X)
    kept = model.kept[t][:, None]
    found = model(kept.sqrt() * X + (1 - kept).sqrt() * noise, t)
    return F.mse_loss(found, noise, reduction="sum"), X.numel()


class Velocity(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(WIDTH + 1, 16, WIDTH)

    def forward(self, x, t):
        return self.net(torch.cat([x, t], 1))


def flow_matching(model, X):
    """Straight paths from noise to data (Lipman et al., 2022)."""
    t, noise = torch.rand(len(X), 1), torch.randn_like(X)
    return summed((model(t * X + (1 - t) * noise, t) - (X - noise)).square().mean(1))


def score_matching(model, X):
    """Denoising score matching of an energy, whose gradient is the score (Vincent, 2011)."""
    noise = torch.randn_like(X)
    noisy = (X + 0.5 * noise).requires_grad_()
    (slope,) = torch.autograd.grad(model(noisy).sum(), noisy, create_graph=True)
    return summed((0.5 * slope - noise).square().mean(1))


def langevin(model, X):
    """An energy that is low at data and high at samples drawn from it (Du and Mordatch, 2019)."""
    sample = torch.rand_like(X)
    for _ in range(3):
        sample = sample.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(sample).sum(), sample)
        sample = sample - 0.1 * slope + 0.01 * torch.randn_like(X)
    return summed(model(X)[:, 0] - model(sample.detach())[:, 0])


class MaskedLinear(nn.Linear):
    """A linear layer with a fixed mask on its weight (MADE, 2015)."""

    def __init__(self, ins, outs, mask):
        super().__init__(ins, outs)
        self.register_buffer("mask", mask)

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


def autoregressive():
    hidden = torch.arange(12) % (WIDTH - 1)
    first = (hidden[:, None] >= torch.arange(WIDTH)).float()
    last = (torch.arange(WIDTH)[:, None] > hidden).float()
    return nn.Sequential(MaskedLinear(WIDTH, 12, first), nn.ReLU(), MaskedLinear(12, WIDTH, last))


class GAN(nn.Module):
    """A generator and a discriminator, of which one is frozen."""

    def __init__(self, frozen):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(),
                                       nn.Linear(8, WIDTH))  # fmt: skip
        self.discriminator = nn.Sequential(spectral_norm(nn.Linear(WIDTH, 8)), nn.LeakyReLU(0.2),
                                           spectral_norm(nn.Linear(8, 1)))  # fmt: skip
        getattr(self, frozen).requires_grad_(False)


def generator_step(model, X):
    fake = model.generator(torch.randn(len(X), 4))
    return summed(F.softplus(-model.discriminator(fake)))


def discriminator_step(model, X):
    with torch.no_grad():
        fake = model.generator(torch.randn(len(X), 4))
    return summed(F.softplus(model.discriminator(fake)) + F.softplus(-model.discriminator(X)))


class Critic(nn.Module):
    """A critic and, frozen, the generator of its forgeries."""

    def __init__(self):
        super().__init__()
        self.critic, self.generator = mlp(WIDTH, 8, 1), mlp(4, 8, WIDTH).requires_grad_(False)


def gradient_penalty(model, X):
    """The critic's loss of a Wasserstein GAN (Gulrajani et al., 2017, algorithm 1)."""
    fake = model.generator(torch.randn(len(X), 4))
    between = torch.lerp(fake, X, torch.rand(len(X), 1)).requires_grad_()
    (slope,) = torch.autograd.grad(model.critic(between).sum(), between, create_graph=True)
    penalty = 10 * (slope.norm(dim=1) - 1) ** 2
    return summed(model.critic(fake)[:, 0] - model.critic(X)[:, 0] + penalty)


class MaskedAutoencoder(nn.Module):
    """Patches are hidden at random, and asked for (He et al., 2021)."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = mlp(4, 8, 8), mlp(8, 8, 4)
        self.mix = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        self.hidden = nn.Parameter(torch.zeros(8))

    def forward(self, patches, keeps):
        return self.decoder(self.mix(torch.where(keeps, self.encoder(patches), self.hidden)))


def hidden_patches(model, X):
    patches = F.unfold(X, 2, stride=2).mT
    order = torch.rand(patches.shape[:2]).argsort(1)
    keeps = (order < 6)[..., None]
    losses = (model(patches, keeps) - patches).square().mean(-1) * ~keeps[..., 0]
    return losses.sum(), (~keeps).sum()


GENERATIVE = {
    "autoencoder": Recipe(autoencoder, pictures, objective=reconstruction, make_optimizer=ADAM),
    "vae": Recipe(VAE, pictures, objective=evidence, make_optimizer=ADAM),
    "vq-vae": Recipe(VQVAE, points, objective=quantised, make_optimizer=ADAM),
    "gumbel softmax": Recipe(GumbelVAE, points, objective=reconstruction, make_optimizer=ADAM),
    "ddpm": Recipe(Denoiser, points, objective=ddpm, make_optimizer=ADAM),
    "flow matching": Recipe(Velocity, points, objective=flow_matching, make_optimizer=ADAM),
    "score matching": Recipe(
        lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.SiLU(), nn.Linear(8, 1)), points,
        objective=score_matching, make_optimizer=ADAM),
    "energy": Recipe(
        lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.SiLU(), nn.Linear(8, 1)), points,
        objective=langevin, make_optimizer=ADAM),
    "autoregressive": Recipe(autoregressive, points, objective=reconstruction),
    "gan, generator": Recipe(
        lambda: GAN(frozen="discriminator"), points, objective=generator_step,
        make_optimizer=trainable(ADAM)),
    "gan, discriminator": Recipe(
        lambda: GAN(frozen="generator"), points, objective=discriminator_step,
        make_optimizer=trainable(ADAM)),
    "gradient penalty": Recipe(
        Critic, points, objective=gradient_penalty, make_optimizer=trainable(ADAM)),
    "masked autoencoder": Recipe(
        MaskedAutoencoder, pictures, objective=hidden_patches, make_optimizer=ADAM),
}  # fmt: skip
