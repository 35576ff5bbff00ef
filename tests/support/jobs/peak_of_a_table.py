"""Print what a training of a large embedding needs at its peak, in sizes of its table.

The argument is the number of devices; 0 stands for a plain loop.
"""

import sys

import torch
from torch import nn

import evenstep

ROWS, WIDTH, STEPS = 1_000_000, 16, 6


class Words(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.table, self.head = nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, ids):
        return self.head(self.table(ids).mean(1))


def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def peak_of(rows, devices):
    """Return the bytes that a training needs at its peak, besides the model."""
    torch.set_num_threads(1)
    model = Words(rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randint(rows, (256, 8)), torch.randint(3, (256,))
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as peaks:
        peaks.write("5")
    if devices:
        with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), devices=devices) as trainer:
            for _ in range(STEPS):
                trainer.step(*batch)
    else:
        for _ in range(STEPS):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
    return status("VmHWM") - before


peak_of(1000, int(sys.argv[1]))  # loads what any training needs
print(peak_of(ROWS, int(sys.argv[1])) / (ROWS * WIDTH * 4))
