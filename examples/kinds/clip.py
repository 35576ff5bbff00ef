"""CLIP: every image is compared with the texts of the whole batch, and every text with images."""

import torch
import torch.nn.functional as F
from torch import nn

import evenstep


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
        self.text, self.scale = nn.EmbeddingBag(50, 8), nn.Parameter(torch.tensor(2.0))

    def forward(self, images, texts):
        return F.normalize(self.image(images)), F.normalize(self.text(texts)), self.scale.exp()


def batches(steps):
    random = torch.Generator().manual_seed(0)
    shown = torch.randn(50, 32, generator=random)
    for _ in range(steps):
        texts = torch.randint(50, (32, 6), generator=random)
        yield shown[texts].mean(1), texts, torch.arange(32)


def loss_of(model, images, texts, index):
    image, text, scale = model(images, texts)
    of_images = F.cross_entropy(scale * image @ text.T, index)
    of_texts = F.cross_entropy(scale * text @ image.T, index)
    return (of_images + of_texts) / 2


def plain(steps=6):
    torch.manual_seed(0)
    model, losses = Clip(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for batch in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


def own_rows(model, images, texts, index):
    image, text, scale = model(images, texts)
    of_images = F.cross_entropy(scale * image @ evenstep.all_gather(text).T, index)
    of_texts = F.cross_entropy(scale * text @ evenstep.all_gather(image).T, index)
    return (of_images + of_texts) / 2


def even(devices="auto", shards=8, steps=6):
    torch.manual_seed(0)
    model, losses = Clip(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"devices": devices, "shards": shards, "layout": evenstep.Layout(side_by_side=True)}
    with evenstep.Trainer(model, optimizer, objective=own_rows, **options) as trainer:
        for batch in batches(steps):
            loss = trainer.step(*batch)
            losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
