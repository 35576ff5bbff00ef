"""A script whose loop adds gradients of its own to those of each step; of rank 1 maybe others.

    torchrun --nproc-per-node 2 tests/support/jobs/own_gradients.py OUT same whole

OUT is a folder for each rank's results, then whether all ranks add the `same` gradient or
`differing` ones, and whether the optimizer is `whole` or split by owners (`optimizer`).
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import evenstep
from evenstep.errors import EvenstepError
from grouping import grouped


def main(out, which, partition):
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    generator, found = torch.Generator().manual_seed(1), {}
    options = {"devices": 1, "clip_norm": 0.5}
    if partition == "optimizer":
        options["divide"] = evenstep.Owners()
    try:
        with evenstep.Trainer(
            model, optimizer, nn.CrossEntropyLoss(), **grouped(**options)
        ) as trainer:
            for _ in range(3):
                X = torch.randn(24, 6, generator=generator)
                y = torch.randint(4, (24,), generator=generator)
                optimizer.zero_grad()
                scale = rank + 1 if which == "differing" else 1
                (model[0].weight.square().sum() * scale).backward()
                found["norm"] = float(trainer.step(X, y).outputs["grad_norm"])
            found["fingerprint"] = trainer.fingerprint()
    except EvenstepError as error:
        found["error"] = str(error)
    (Path(out) / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
