"""Classifies digits; our own program, of the shape of a public one whose text is not copied.

The original: https://github.com/pytorch/examples/blob/main/mnist/main.py
The same: a small convolutional network with dropout, Adadelta, StepLR, a DataLoader that shuffles,
`train` and `test` functions with the negative log-likelihood, and what is printed where.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.dropout = nn.Dropout(dropout)
        self.fc1, self.fc2 = nn.Linear(256, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout(F.max_pool2d(x, 2)).flatten(1)
        return F.log_softmax(self.fc2(self.dropout(F.relu(self.fc1(x)))), dim=1)


def digits(count, seed):
    """Make images of 12 x 12 pixels: a pattern for each class, and noise."""
    patterns = torch.rand(10, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    noise = torch.randn(count, 1, 12, 12, generator=generator)
    return TensorDataset(patterns[labels] + 0.3 * noise, labels)


def train(args, model, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"train epoch {epoch}, batch {batch_idx}: loss {loss.item():.6f}")


def test(model, test_loader):
    model.eval()
    total, correct = 0.0, 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            total += F.nll_loss(output, target, reduction="sum").item()
            correct += (output.argmax(1) == target).sum().item()
    count = len(test_loader.dataset)
    print(f"test loss {total / count:.4f}, accuracy {correct}/{count}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=4)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train_loader = DataLoader(digits(400, seed=1), args.batch_size, shuffle=True)
    test_loader = DataLoader(digits(100, seed=2), 100)
    model = Net(args.dropout)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, train_loader, optimizer, epoch)
        test(model, test_loader)
        scheduler.step()


if __name__ == "__main__":
    main()
