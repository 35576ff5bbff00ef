"""Trains a GAN of convolutions; our own program, of the shape of a public one.

The original: https://github.com/pytorch/examples/blob/main/dcgan/main.py
The same: a generator of transposed convolutions and a discriminator, both with batch normalization,
an Adam optimizer for each, and one step of each network for a batch.
Different: the two losses are functions, which draw their noise; there the loop has these lines.
"""

import argparse

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--niter", type=int, default=3, help="epochs")
parser.add_argument("--nz", type=int, default=8, help="size of the noise")
parser.add_argument("--seed", type=int, default=1)
opt = parser.parse_args()
torch.manual_seed(opt.seed)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(opt.nz, 16, 4, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2),
            nn.Conv2d(8, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2),
            nn.Conv2d(16, 1, 4, bias=False), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, image):
        return self.main(image).flatten()


def images(count):
    """Make images of 16 x 16 pixels, each a bright square on a dark ground."""
    generator = torch.Generator().manual_seed(0)
    x = torch.full((count, 1, 16, 16), -1.0)
    corners = torch.randint(1, 10, (count, 2), generator=generator).tolist()
    for image, (top, left) in zip(x, corners, strict=True):
        image[:, top : top + 5, left : left + 5] = 1.0
    return TensorDataset(x)


dataloader = DataLoader(images(320), opt.batch_size, shuffle=True)
net = nn.ModuleDict({"G": Generator(), "D": Discriminator()})
criterion = nn.BCELoss()
optimizerD = optim.Adam(net["D"].parameters(), lr=0.0005, betas=(0.5, 0.999))
optimizerG = optim.Adam(net["G"].parameters(), lr=0.001, betas=(0.5, 0.999))


def fakes(net, count):
    return net["G"](torch.randn(count, opt.nz, 1, 1))


def err_d(net, real):
    output_real, output_fake = net["D"](real), net["D"](fakes(net, len(real)).detach())
    err_real = criterion(output_real, torch.ones_like(output_real))
    return err_real + criterion(output_fake, torch.zeros_like(output_fake))


def err_g(net, real):
    output = net["D"](fakes(net, len(real)))
    return criterion(output, torch.ones_like(output))


for epoch in range(opt.niter):
    for i, (real,) in enumerate(dataloader):
        # train with all-real and all-fake batches
        optimizerD.zero_grad()
        errD = err_d(net, real)
        errD.backward()
        optimizerD.step()
        # the discriminator shall take fake images for real ones
        optimizerG.zero_grad()
        errG = err_g(net, real)
        errG.backward()
        optimizerG.step()
        print(f"epoch {epoch}, batch {i}, generator: loss {errG.item():.6f}, D {errD.item():.6f}")
