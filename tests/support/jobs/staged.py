"""A script that trains in stages; each process has stages, or none, of its own.

    torchrun --nproc-per-node 2 tests/support/jobs/staged.py OUT 2,1 4,2 1 optimizer

OUT is a folder for each rank's results, then the numbers of stages and of devices of each rank (one
stage: none are given), the steps in flight, and what is split by owners ("none": nothing).
"""

import functools
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import evenstep
from evenstep.distributed.machines import reduce
from evenstep.metrics import accuracy
from grouping import grouped
from zoo import build, make_batches, options_of

MODELS = ("batch_norm", "dropout", "recurrent", "tied", "unused", "branching")
ADAM = functools.partial(torch.optim.Adam, lr=0.01)


def train(name, options):
    """Return the fingerprint, the losses, and the accuracy."""
    model = build(name)
    optimizer = ADAM(model.parameters())
    options = {**options_of(model), **options}
    batches = make_batches((33, 16, 30))
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **grouped(**options)) as trainer:
        losses = [float(loss) for loss in [trainer.step(X, y) for X, y in batches]]
        measured = trainer.evaluate(batches, {"accuracy": accuracy})
        return [trainer.fingerprint(), losses, measured]


def main():
    """Train everything, and write the results of this rank."""
    reduce.BUCKET_BYTES = 200  # so that gradients leave during backward passes
    out, rank = Path(sys.argv[1]), int(os.environ.get("RANK", "0"))
    stages, devices = (int(text.split(",")[rank]) for text in sys.argv[2:4])
    options = {"devices": devices, "max_in_flight": int(sys.argv[4])}
    staged = [evenstep.Stages(f"balanced:{stages}")] if stages > 1 else []
    owned = [evenstep.Owners()] if sys.argv[5] == "owners" else []
    options["divide"] = (*staged, *owned)
    results = {name: train(name, options) for name in MODELS}
    (out / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
