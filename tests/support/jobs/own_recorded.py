"""A training by evenstep that is recorded, in one process or several.

    python tests/support/jobs/own_recorded.py OUT [owners]

Each process records to the folder OUT; with `owners`, each keeps a part of the optimizer's state.
"""

import sys

import torch
from torch import nn

import evenstep
from evenstep.data import Loader


def main(out, *words):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.utils.data.TensorDataset(torch.randn(96, 4), torch.arange(96) % 3)
    layout = evenstep.Layout(divide=evenstep.Owners() if "owners" in words else ())
    with (
        evenstep.record(out),
        evenstep.Trainer(
            model, optimizer, nn.CrossEntropyLoss(), devices=1, layout=layout
        ) as trainer,
    ):
        for X, y in trainer.epoch(Loader(data, 32)):
            trainer.step(X, y)


if __name__ == "__main__":
    main(*sys.argv[1:])
