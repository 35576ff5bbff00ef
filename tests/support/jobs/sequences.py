"""A script that trains on (time, batch, features), beside a tensor that every shard gets whole.

    torchrun --nproc-per-node 2 tests/support/jobs/sequences.py OUT

The last batch of an epoch has one example, so one of the processes has no part of it.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

import evenstep
from evenstep.checkpoint.fingerprint import tensor_digest
from evenstep.data import Loader

EXAMPLES, TIME, BATCH = 33, 5, 16


class Net(nn.Module):
    """A recurrent network with an output at each time."""

    def __init__(self):
        super().__init__()
        self.body = nn.GRU(3, 4)

    def forward(self, X):
        return self.body(X)[0]


def objective(model, X, y, scale):
    """Squared errors, scaled by what all shards share."""
    return ((model(X) - y).square().sum(2) * scale).sum(), y.shape[0] * y.shape[1]


def collate(examples):
    """Return (time, batch, features), and a tensor for all examples."""
    X, y = zip(*examples, strict=True)
    return torch.stack(X, 1), torch.stack(y, 1), evenstep.shared(torch.arange(TIME)[:, None])


def main():
    """Train on parts of batches and on whole ones, and write what came of it."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(EXAMPLES, TIME, 3, generator=generator)
    y = torch.randn(EXAMPLES, TIME, 4, generator=generator)
    loader = Loader(TensorDataset(X, y), BATCH, seed=1, collate_fn=collate)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with evenstep.Trainer(
        model,
        optimizer,
        objective=objective,
        devices=1,
        experiment=evenstep.Experiment(batch_dim=1),
    ) as trainer:
        for batch in trainer.epoch(loader):
            trainer.step(*batch)
        for batch in loader:
            trainer.step(*batch)
        predicted = trainer.predict(loader)
        told = [trainer.fingerprint(), [*predicted.shape], tensor_digest(predicted)]
    rank = int(os.environ.get("RANK", "0"))
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
