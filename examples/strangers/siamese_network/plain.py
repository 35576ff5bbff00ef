"""Learns which two images show the same; our own program, of the shape of a public one.

The original: https://github.com/pytorch/examples/blob/main/siamese_network/main.py
The same: one convolutional network with batch normalization for both images, a small head for the
pair, a data set that draws the partner of each image, BCELoss, Adadelta, StepLR.
"""

import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        self.fc = nn.Sequential(nn.Linear(2 * 144, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, input1, input2):
        both = torch.cat((self.body(input1), self.body(input2)), 1)
        return torch.sigmoid(self.fc(both)).squeeze(1)


class Matcher(Dataset):
    """Pairs of images of 12 x 12 pixels; every second pair shows the same pattern."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        patterns = torch.rand(5, 1, 12, 12, generator=torch.Generator().manual_seed(0))
        self.labels = torch.randint(5, (count,), generator=generator).tolist()
        noise = torch.randn(count, 1, 12, 12, generator=generator)
        self.images = patterns[self.labels] + 0.1 * noise
        self.groups = {
            label: [i for i, other in enumerate(self.labels) if other == label]
            for label in range(5)
        }

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        label = self.labels[index]
        if index % 2:
            label = random.choice([other for other in self.groups if other != label])
        partner = random.choice(self.groups[label])
        target = torch.tensor(float(label == self.labels[index]))
        return self.images[index], self.images[partner], target


def train(args, model, train_loader, optimizer, epoch):
    model.train()
    criterion = nn.BCELoss()
    for batch_idx, (images_1, images_2, targets) in enumerate(train_loader):
        optimizer.zero_grad()
        outputs = model(images_1, images_2)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"train epoch {epoch}, batch {batch_idx}: loss {loss.item():.6f}")


def test(model, test_loader):
    model.eval()
    total, correct = 0.0, 0
    with torch.no_grad():
        for images_1, images_2, targets in test_loader:
            outputs = model(images_1, images_2)
            total += F.binary_cross_entropy(outputs, targets, reduction="sum").item()
            correct += ((outputs > 0.5) == (targets > 0.5)).sum().item()
    count = len(test_loader.dataset)
    print(f"test loss {total / count:.4f}, accuracy {correct}/{count}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=4)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    random.seed(args.seed)
    train_loader = DataLoader(Matcher(320, seed=1), args.batch_size, shuffle=True)
    test_loader = DataLoader(Matcher(100, seed=2), 100)
    model = SiameseNetwork()
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        train(args, model, train_loader, optimizer, epoch)
        test(model, test_loader)
        scheduler.step()


if __name__ == "__main__":
    main()
