"""Trains a variational autoencoder; our own program, of the shape of a public one.

The original: https://github.com/pytorch/examples/blob/main/vae/main.py
The same: two linear layers in encoder and decoder, noise drawn in `forward`, a loss that is a sum
over the batch (cross entropy and divergence), Adam, and a `train` function of global names.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--log-interval", type=int, default=4)
args = parser.parse_args()
torch.manual_seed(args.seed)


def images(count, seed):
    """Make images of 8 x 8 pixels, each a bar on a dark ground."""
    generator = torch.Generator().manual_seed(seed)
    x, labels = torch.zeros(count, 8, 8), torch.randint(8, (count,), generator=generator)
    x[torch.arange(count), labels] = 1.0
    return TensorDataset(x.unsqueeze(1), labels)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.mu, self.logvar = nn.Linear(32, 4), nn.Linear(32, 4)
        self.fc3, self.fc4 = nn.Linear(4, 32), nn.Linear(32, 64)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def forward(self, x):
        h = F.relu(self.fc1(x.view(-1, 64)))
        mu, logvar = self.mu(h), self.logvar(h)
        z = self.reparameterize(mu, logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


model = VAE()
optimizer = optim.Adam(model.parameters(), lr=1e-2)
train_loader = DataLoader(images(400, seed=1), args.batch_size, shuffle=True)
test_loader = DataLoader(images(100, seed=2), args.batch_size)


def loss_function(recon_x, mu, logvar, x):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


def train(epoch):
    model.train()
    train_loss = 0.0
    for batch_idx, (data, _) in enumerate(train_loader):
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, mu, logvar, data)
        loss.backward()
        optimizer.step()
        train_loss += float(loss)
        if batch_idx % args.log_interval == 0:
            print(f"epoch {epoch}, batch {batch_idx}: loss {float(loss) / len(data):.6f}")
    print(f"epoch {epoch}, average loss {train_loss / len(train_loader.dataset):.4f}")


def test():
    model.eval()
    test_loss = 0.0
    with torch.no_grad():
        for data, _ in test_loader:
            test_loss += float(loss_function(*model(data), data))
    print(f"test set, average loss {test_loss / len(test_loader.dataset):.4f}")


if __name__ == "__main__":
    for epoch in range(1, args.epochs + 1):
        train(epoch)
        test()
