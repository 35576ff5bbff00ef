"""Classifies images by a vision transformer; our own program, of the shape of a public one.

The original: https://github.com/pytorch/examples/blob/main/vision_transformer/main.py
The same: images cut into patches, a class token and positions that are learned, blocks of attention
with dropout, Adam, a function for an epoch of training and one to evaluate, a history of losses.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout),
            nn.Linear(2 * width, width), nn.Dropout(dropout),
        )  # fmt: skip

    def forward(self, x):
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, dropout, size=12, patch=4, width=32, depth=2, classes=10):
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(patch * patch, width)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.1 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*[Block(width, 4, dropout) for _ in range(depth)])
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        patches = F.unfold(x, self.patch, stride=self.patch).transpose(1, 2)
        token = self.token.expand(len(x), -1, -1)
        x = torch.cat((token, self.embed(patches)), 1) + self.positions
        return self.head(self.blocks(x)[:, 0])


def images(count, seed):
    """Make images of 12 x 12 pixels: a pattern for each class, and noise."""
    patterns = torch.rand(10, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    noise = torch.randn(count, 1, 12, 12, generator=generator)
    return TensorDataset(patterns[labels] + 0.3 * noise, labels)


def train_epoch(model, optimizer, data_loader, loss_history):
    model.train()
    for i, (data, target) in enumerate(data_loader):
        optimizer.zero_grad()
        output = F.log_softmax(model(data), dim=1)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        loss_history.append(loss.item())
        print(f"batch {i}: loss {loss.item():.6f}")


def evaluate(model, data_loader):
    model.eval()
    with torch.no_grad():
        right = sum((model(data).argmax(1) == target).sum().item() for data, target in data_loader)
    print(f"accuracy {right}/{len(data_loader.dataset)}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--dropout", type=float, default=0.1)
    args = parser.parse_args()
    torch.manual_seed(42)
    train_loader = DataLoader(images(320, seed=1), batch_size=32, shuffle=True)
    test_loader = DataLoader(images(100, seed=2), batch_size=100)
    model = ViT(args.dropout)
    optimizer = optim.Adam(model.parameters(), lr=0.003)
    loss_history = []
    for epoch in range(1, args.epochs + 1):
        print(f"epoch {epoch}")
        train_epoch(model, optimizer, train_loader, loss_history)
        evaluate(model, test_loader)
    print(f"{len(loss_history)} steps; the last one's training loss was {loss_history[-1]:.4f}")


if __name__ == "__main__":
    main()
