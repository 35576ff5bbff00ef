"""A U-Net with the Dice loss of the whole batch: a ratio of two sums over all of its pixels."""

import torch
import torch.nn.functional as F
from torch import nn

import evenstep


def block(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU()
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.deep, self.up = block(1, 8), block(8, 16), block(24, 8)
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, images):
        fine = self.down(images)
        coarse = F.interpolate(self.deep(F.max_pool2d(fine, 2)), scale_factor=2.0)
        return self.head(self.up(torch.cat([fine, coarse], 1)))


def batches(steps):
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        masks = F.interpolate(torch.randn(16, 1, 2, 2, generator=random), 16).gt(0).float()
        yield masks + 0.3 * torch.randn(16, 1, 16, 16, generator=random), masks


def loss_of(model, images, masks):
    guess = model(images).sigmoid()
    sums = torch.stack([(guess * masks).sum(), guess.sum() + masks.sum()])
    return 1 - (2 * sums[0] + 1) / (sums[1] + 1)


def plain(steps=6):
    torch.manual_seed(0)
    model, losses = UNet(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for images, masks in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model, images, masks)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, optimizer, losses


def gathered(model, images, masks):
    guess = model(images).sigmoid()
    sums = torch.stack([(guess * masks).sum(), guess.sum() + masks.sum()])
    sums = evenstep.all_gather(sums[None]).sum(0)
    return 1 - (2 * sums[0] + 1) / (sums[1] + 1)


def even(devices="auto", shards=8, steps=6):
    torch.manual_seed(0)
    model, losses = UNet(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    options = {"devices": devices, "shards": shards, "layout": evenstep.Layout(side_by_side=True)}
    with evenstep.Trainer(model, optimizer, objective=gathered, **options) as trainer:
        for images, masks in batches(steps):
            loss = trainer.step(images, masks)
            losses.append(loss.item())
    return model, optimizer, losses


if __name__ == "__main__":
    print(even()[-1])
