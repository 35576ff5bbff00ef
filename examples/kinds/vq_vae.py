"""VQ-VAE: the codebook is a running mean of the codes that the batch has assigned to each entry."""

import torch
import torch.nn.functional as F
from torch import nn

import evenstep


class VqVae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32))
        self.register_buffer("book", torch.randn(16, 8))
        self.register_buffer("seen", torch.ones(16))  # how often each entry was used
        self.register_buffer("used", torch.zeros(16))  # the same, in this batch
        self.register_buffer("sums", torch.zeros(16, 8))  # of the codes, in this batch

    def forward(self, X):
        code = self.encoder(X)
        chosen = F.one_hot(torch.cdist(code.detach(), self.book).argmin(1), 16).float()
        if self.training:
            self.used += chosen.sum(0)
            self.sums += chosen.T @ code.detach()
        entry = chosen @ self.book
        return self.decoder(code + (entry - code).detach()), code, entry


@torch.no_grad()
def follow(model):
    """Move every entry of the codebook towards the mean of its codes in the batch."""
    model.seen.lerp_(model.used, 0.05)
    means = model.sums / model.used.clamp(min=1)[:, None]
    model.book.lerp_(means, 0.05 * model.used.gt(0)[:, None].float())
    model.used.zero_()
    model.sums.zero_()


def loss_of(model, X):
    restored, code, entry = model(X)
    return F.mse_loss(restored, X) + 0.25 * F.mse_loss(code, entry)


def batches(steps):
    random = torch.Generator().manual_seed(0)
    kinds = torch.randn(10, 32, generator=random)
    for _ in range(steps):
        yield kinds[torch.randint(10, (64,), generator=random)]


def plain(steps=6):
    torch.manual_seed(0)
    model, losses = VqVae(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for X in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model, X)
        loss.backward()
        optimizer.step()
        follow(model)
        losses.append(loss.item())
    return model, optimizer, losses


def even(devices="auto", shards=8, steps=6):
    torch.manual_seed(0)
    model, losses = VqVae(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"devices": devices, "shards": shards, "after_update": follow}
    options["experiment"] = evenstep.Experiment(buffers={"used": "sum", "sums": "sum"})
    with evenstep.Trainer(model, optimizer, objective=loss_of, **options) as trainer:
        for X in batches(steps):
            loss = trainer.step(X)
            losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
