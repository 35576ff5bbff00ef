"""Trainings in portable arithmetic, whose fingerprints are the same on every processor.

`python tests/support/portable_trainings.py [NAME...]` prints them as JSON, with what computed them.
Weights, data and steps are all portable.
"""

import json
import platform
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

import evenstep
from evenstep.arithmetic import native
from evenstep.data import digits
from evenstep.models import lenet, resnet18
from evenstep.models.gpt import gpt


class Reader(nn.Module):
    """An LSTM that reads an image row by row."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(28, 24, batch_first=True)
        self.head = nn.Linear(24, 10)

    def forward(self, x):
        return self.head(self.lstm(x.squeeze(1))[0][:, -1])


class VAE(nn.Module):
    """A variational autoencoder (Kingma and Welling, 2014) of images."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.Softplus())
        self.mean, self.log_variance = nn.Linear(64, 8), nn.Linear(64, 8)
        self.decode = nn.Sequential(nn.Linear(8, 64), nn.ELU(), nn.Linear(64, 784))

    def forward(self, x):
        hidden = self.encode(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        return self.decode(code), mean, log_variance


def elbo(model, x, _):
    """Return the negative evidence lower bound, as a sum over examples."""
    output, mean, log_variance = model(x)
    target = x.flatten(1).clamp(0, 1)
    fit = functional.binary_cross_entropy_with_logits(output, target, reduction="sum")
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
    return fit + divergence, len(x)


class Word2Vec(nn.Module):
    """Skip-grams with negative samples (Mikolov et al., 2013)."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Embedding(200, 16), nn.Embedding(200, 16)

    def forward(self, centre, context):
        return torch.einsum("nd,nkd->nk", self.inner(centre), self.outer(context))


def of_words(model, centre, context):
    """Return the loss of one true context and four negative ones, as a sum over examples."""
    sign = torch.tensor([1.0, -1.0, -1.0, -1.0, -1.0])
    return -functional.logsigmoid(sign * model(centre, context)).sum(), len(centre)


def images(batch=64, count=4):
    examples, labels = digits()[: batch * count - 5]  # the last batch is uneven
    return [*zip(examples.split(batch), labels.split(batch), strict=True)]


def pictures():
    return [(torch.randn(32, 1, 28, 28), torch.randint(10, (32,))) for _ in range(2)]


def tokens():
    return [(t[:, :-1], t[:, 1:]) for t in torch.randint(65, (3, 16, 33))]


def words():
    return [(torch.randint(200, (64,)), torch.randint(200, (64, 5))) for _ in range(4)]


def of_tokens(model, x, y):
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum"), y.numel()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


class Muon(nn.Module):
    """A perceptron without biases: Muon takes matrices only."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 32, bias=False), nn.Tanh(), nn.Linear(32, 10, bias=False)
        )

    def forward(self, x):
        return self.layers(x)


def muon(parameters):
    return torch.optim.Muon(parameters, lr=0.02)


class Training(NamedTuple):
    """A training: model, batches and optimizer; `objective` in place of cross entropy."""

    model: Callable[[], nn.Module]
    batches: Callable[[], list]
    optimizer: Callable
    objective: Callable | None = None


TRAININGS = {
    "LeNet, SGD": Training(lenet, images, sgd),
    "ResNet-18, SGD": Training(resnet18, pictures, sgd),
    "LSTM, Adam": Training(Reader, images, adam),
    "GPT, AdamW": Training(
        lambda: gpt(layers=2, heads=4, width=64, context=32, dropout=0.1), tokens, adamw, of_tokens
    ),
    "VAE, Adam": Training(VAE, images, adam, elbo),
    "word2vec, SGD": Training(Word2Vec, words, sgd, of_words),
    "perceptron, Muon": Training(Muon, images, muon),
}


def fingerprint(name, **layout):
    """Train, and return the fingerprint of the training state."""
    return trained(name, **layout)


def trained(name, epochs=2, shards=8, state=(), **layout):
    """Train, and return the fingerprint.

    Args:
        name: the training.
        epochs: how often all batches are trained on.
        shards: V.
        state: ("save", folder) to stop and save in the middle; ("load", folder) to go on there.
        layout: options of the trainer.
    """
    training = TRAININGS[name]
    with evenstep.portable(seed=0):
        model = training.model()
        batches = training.batches() * epochs
    optimizer = training.optimizer(model.parameters())
    what = {"objective": training.objective, "loss": nn.CrossEntropyLoss()}
    what.pop("loss" if training.objective else "objective")
    layout["experiment"] = evenstep.Experiment(shards=shards, arithmetic="portable")
    call, folder = state or ("", "")
    if call == "load":
        trainer = evenstep.Trainer.load(folder, model, optimizer, **what, **layout)
    else:
        trainer = evenstep.Trainer(model, optimizer, **what, **layout)
    with trainer:
        for batch in batches[trainer.position.steps_done :]:
            trainer.step(*batch)
            if call == "save" and trainer.position.steps_done == len(batches) // 2:
                trainer.save(folder)
                break
        return trainer.fingerprint()


if __name__ == "__main__":
    names = sys.argv[1:] or TRAININGS
    found = {name: fingerprint(name, devices=1) for name in names}
    facts = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "vectors of torch": torch.backends.cpu.get_cpu_capability(),
        "variant": native.library().portable_name().decode(),
    }
    print(json.dumps({"facts": facts, "fingerprints": found}, indent=1))
