"""A plain script for one process or several, without evenstep's trainer: something to compare.

evenstep record --out one.rec examples/ddp_digits.py
evenstep record --out two.rec torchrun --nproc-per-node 2 examples/ddp_digits.py
evenstep compare one.rec two.rec
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from evenstep.data import digits

BATCH, EPOCHS = 64, 1


def make_model() -> nn.Module:
    """Return a small network with batch normalisation."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def main() -> None:
    """Train as most scripts do."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data, model, sampler = digits(), make_model(), None
    if processes > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
        sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, BATCH // processes, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    if processes > 1:
        dist.barrier()  # a group that ends right after its last sum may hang (pytorch#56297)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
