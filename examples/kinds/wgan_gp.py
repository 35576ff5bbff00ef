"""WGAN-GP: a critic with a gradient penalty, and a generator that learns every third step."""

import torch
from torch import nn

import evenstep


class Adversaries(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))


def of_critic(model, real, noise, between):
    fake = model.generator(noise).detach()
    mixed = torch.lerp(real, fake, between).requires_grad_()
    (slope,) = torch.autograd.grad(model.critic(mixed).sum(), mixed, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return model.critic(fake).mean() - model.critic(real).mean() + 10 * penalty


def of_generator(model, noise):
    return -model.critic(model.generator(noise)).mean()


def batches(steps):
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        angles = 6.28 * torch.rand(64, generator=random)
        noise, between = torch.randn(64, 4, generator=random), torch.rand(64, 1, generator=random)
        yield torch.stack([angles.cos(), angles.sin()], 1), noise, between


def adams(model):
    parts = model.critic, model.generator
    return [torch.optim.Adam(one.parameters(), lr=0.01, betas=(0.5, 0.9)) for one in parts]


def plain(steps=9):
    torch.manual_seed(0)
    model, losses = Adversaries(), []
    critics, generators = adams(model)
    for step, (real, noise, between) in enumerate(batches(steps)):
        critics.zero_grad()
        loss = of_critic(model, real, noise, between)
        loss.backward()
        critics.step()
        if step % 3 == 2:
            generators.zero_grad()
            of_generator(model, noise).backward()
            generators.step()
        losses.append(loss.item())
    return model, (critics, generators), losses


def even(devices="auto", shards=8, steps=9):
    torch.manual_seed(0)
    model, losses = Adversaries(), []
    critics, generators = adams(model)
    options = {"devices": devices, "shards": shards, "state": {"generators": generators}}
    with evenstep.Trainer(model, critics, objective=of_critic, **options) as trainer:
        for step, (real, noise, between) in enumerate(batches(steps)):
            loss = trainer.step(real, noise, between)
            if step % 3 == 2:
                trainer.backward(noise, objective=of_generator)
                generators.step()
            losses.append(loss.item())
    return model, (critics, generators), losses


if __name__ == "__main__":
    print(even()[-1])
