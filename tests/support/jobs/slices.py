"""A script that trains a model with sliced layers; a process's devices share each shard's layers.

    torchrun --nproc-per-node 2 tests/support/jobs/slices.py OUT 2,1 slices [other]

OUT is a folder for each rank's result, then the devices of each rank, and what they divide. With
"other", the second process cuts the layers into another number of slices.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import evenstep
from grouping import grouped
from slicing import sliced_model
from zoo import make_batches


def main(out, devices, split, other=""):
    rank = int(os.environ.get("RANK", "0"))
    model = sliced_model(2 if other and rank else 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    divide = evenstep.Slices() if split == "slices" else ()
    options = {"devices": int(devices.split(",")[rank]), "divide": divide}
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **grouped(**options)) as trainer:
        losses = [float(trainer.step(X, y)) for X, y in make_batches((33, 16, 30))]
        result = [trainer.fingerprint(), losses]
    (Path(out) / f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
