"""A script whose loops draw random numbers, and what is said about it.

torchrun --nproc-per-node 2 tests/support/jobs/drawing.py OUT
"""

import json
import logging
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

import evenstep
from evenstep.data import Loader, digits

EXAMPLES = TensorDataset(*(tensor[:64] for tensor in digits(train=True).tensors))
PARTS = Loader(EXAMPLES, 16, seed=1)
OWN = torch.Generator().manual_seed(0)


def mixed(trainer, **options):
    """Mix the examples of a batch."""
    for X, y in trainer.epoch(PARTS, **options):
        trainer.step(X + 0.1 * X[torch.randperm(len(X))], y)


def noised(trainer):
    """Add noise of numpy's."""
    for X, y in trainer.epoch(PARTS):
        trainer.step(X + torch.from_numpy(np.random.randn(*X.shape)).float(), y)


def chosen(trainer):
    """Flip examples by Python's own numbers, in the second epoch."""
    for epoch in range(2):
        for X, y in trainer.epoch(PARTS):
            flips = [random.random() < 0.5 for _ in X] if epoch else []
            trainer.step(X * (1 - 2 * torch.tensor(flips))[:, None, None, None] if epoch else X, y)


def whole(trainer):
    """Mix the examples of whole batches."""
    mixed(trainer, whole=True)


def collated(trainer):
    """Mix whole batches, which this loader gives to every process."""
    loader = DataLoader(EXAMPLES, 16, collate_fn=torch.utils.data.default_convert)
    for batch in trainer.epoch(loader):
        X, y = (torch.stack([torch.as_tensor(one[k]) for one in batch]) for k in (0, 1))
        trainer.step(X + 0.1 * X[torch.randperm(len(X))], y)


def by_hand(trainer):
    """Mix whole batches of a list."""
    for X, y in [EXAMPLES[:16], EXAMPLES[16:32]]:
        trainer.step(X + 0.1 * X[torch.randperm(len(X))], y)


def beside(trainer):
    """Draw after the step, from a generator of its own before it, and evaluate meanwhile."""
    for X, y in trainer.epoch(PARTS):
        torch.rand(3, generator=OWN)
        trainer.evaluate(PARTS, {"sum": lambda output, y: (output.sum(), len(y))})
        trainer.step(X, y)
        torch.rand(3)


def plain(trainer):
    """Draw nothing; the model's dropout does."""
    for X, y in trainer.epoch(DataLoader(EXAMPLES, 16, shuffle=True)):
        trainer.step(X, y)


def replayed(trainer):
    """Step on earlier examples too, as many as this process's part has."""
    for X, y in trainer.epoch(PARTS):
        trainer.step(X, y)
        trainer.step(*EXAMPLES[:8])


def scaled(trainer):
    """Step on examples that are made of the part's."""
    for X, y in trainer.epoch(PARTS):
        trainer.step(X / 2, y + 0)


LOOPS = [mixed, noised, chosen, whole, collated, by_hand, beside, plain, replayed, scaled]


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def main():
    """Run every loop, and write what was said."""
    found = {}
    for loop in LOOPS:
        heard = Lines()
        logging.getLogger("evenstep").addHandler(heard)
        for kind in (torch.manual_seed, random.seed, np.random.seed):
            kind(0)
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(784, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"devices": 1, "max_in_flight": 2 if loop in (mixed, plain) else 1}
        with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **options) as trainer:
            loop(trainer)
        logging.getLogger("evenstep").removeHandler(heard)
        found[loop.__name__] = [line for line in heard.lines if "whole=True" in line]
    rank = os.environ.get("RANK", "0")
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
