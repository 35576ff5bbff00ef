"""A script that trains compiled shards, in one process or many.

    torchrun --nproc-per-node 2 tests/support/jobs/hybridized.py OUT [RANK]

OUT is a folder for each rank's fingerprint or error; RANK has no compiler.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch._inductor import compile_fx

sys.path.insert(0, str(Path(__file__).parents[1]))

import evenstep
from evenstep.errors import PeerError
from zoo import build, make_batches


def no_compiler(*_):
    raise RuntimeError("no compiler is there")


def main():
    """Train, and write what came of it."""
    out, rank = Path(sys.argv[1]), os.environ.get("RANK", "0")
    if sys.argv[2:] == [rank]:
        compile_fx.compile_fx = no_compiler
    model = build("dropout")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    try:
        with evenstep.Trainer(
            model,
            optimizer,
            nn.CrossEntropyLoss(),
            devices=1,
            experiment=evenstep.Experiment(compile=True),
        ) as trainer:
            for batch in make_batches((33, 16)):
                trainer.step(*batch)
            told = f"{trainer.fingerprint()} {trainer.hybridized.why_not}"
    except PeerError as error:
        told = str(error)
    (out / f"{rank}.txt").write_text(told)


if __name__ == "__main__":
    main()
