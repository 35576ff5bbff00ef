"""A masked autoencoder: a transformer sees a quarter of an image's patches, and paints the rest."""

import torch
from torch import nn

import evenstep

PATCHES, SEEN, WIDTH = 16, 4, 16


def layer():
    return nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)


class Mae(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)
        self.encoder, self.decoder = layer(), layer()
        self.places = nn.Parameter(0.1 * torch.randn(PATCHES, WIDTH))
        self.unseen = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, patches, order):
        seen = order[:, :SEEN, None].expand(-1, -1, WIDTH)
        tokens = self.encoder((self.embed(patches) + self.places).gather(1, seen))
        all_tokens = self.unseen.expand(len(patches), PATCHES, WIDTH).scatter(1, seen, tokens)
        return self.head(self.decoder(all_tokens + self.places))


def loss_of(model, patches, noise):
    order = noise.argsort(1)
    hidden = torch.ones_like(noise).scatter(1, order[:, :SEEN], 0.0)
    errors = (model(patches, order) - patches).square().mean(2)
    return (errors * hidden).sum() / (len(patches) * (PATCHES - SEEN))


def batches(steps):
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        shades = torch.randn(32, 1, 8, generator=random).expand(32, PATCHES, 8)
        yield shades.contiguous(), torch.rand(32, PATCHES, generator=random)


def plain(steps=6):
    torch.manual_seed(0)
    model, losses = Mae(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for patches, noise in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model, patches, noise)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


def even(devices="auto", shards=8, steps=6):
    torch.manual_seed(0)
    model, losses = Mae(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"devices": devices, "shards": shards}
    with evenstep.Trainer(model, optimizer, objective=loss_of, **options) as trainer:
        for patches, noise in batches(steps):
            loss = trainer.step(patches, noise)
            losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
