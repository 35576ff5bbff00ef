"""ResNet-18 on Fashion-MNIST as the book trains it on one device (0.93) and on two (0.67).

    evenstep record --steps 2 --out one.rec examples/book_resnet18.py
    evenstep record --steps 2 --out two.rec torchrun --nproc-per-node 2 examples/book_resnet18.py
    evenstep compare one.rec two.rec

After "Concise Implementation for Multiple GPUs" of Dive into Deep Learning, in plain PyTorch: 256
images and a rate of 0.1 for each device. Every process draws the whole batch and takes its part of
it, as `nn.DataParallel` does. The options take away what differs, one thing after another.
"""

import argparse
import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import evenstep
from evenstep.data import fashion_mnist
from evenstep.models import resnet18

RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, help="of weights and order (the book sets none)")
    parser.add_argument("--batch-size", type=int, default=256 * PROCESSES)
    parser.add_argument("--lr", type=float, default=0.1 * PROCESSES)
    parser.add_argument("--norm", choices=("batch", "group"), default="batch")
    parser.add_argument("--evenstep", type=int, metavar="DEVICES", help="train with evenstep")
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--data-dir", help="where Fashion-MNIST is, or goes")
    return parser.parse_args()


def make_net(norm: str) -> nn.Module:
    """Return the book's network, initialised as in the book, with one kind of normalisation."""
    net = resnet18()
    for module in [*net.modules()]:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
        for name, child in module.named_children():
            if norm == "group" and isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(8, child.num_features))
    return net


def main(given: argparse.Namespace) -> None:
    """Train as the book does."""
    seed = [torch.seed() if given.seed is None else given.seed]
    if PROCESSES > 1:
        dist.init_process_group("gloo")
        dist.broadcast_object_list(seed)
    torch.manual_seed(seed[0])
    net, loss = make_net(given.norm), nn.CrossEntropyLoss()
    images = fashion_mnist(data_dir=given.data_dir)
    batches = itertools.islice(DataLoader(images, given.batch_size, shuffle=True), given.updates)
    if given.evenstep:
        optimizer = torch.optim.SGD(net.parameters(), given.lr)
        with evenstep.Trainer(net, optimizer, loss, devices=given.evenstep) as trainer:
            for X, y in batches:
                trainer.step(X, y)
        return
    if PROCESSES > 1:
        net = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), given.lr)
    for X, y in batches:
        X, y = X.chunk(PROCESSES)[RANK], y.chunk(PROCESSES)[RANK]
        optimizer.zero_grad()
        loss(net(X), y).backward()
        optimizer.step()
    if PROCESSES > 1:
        dist.barrier()  # a group that ends right after its last sum may hang (pytorch#56297)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(parse())
