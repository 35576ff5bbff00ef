"""A script that trains in two processes again and again, with another kernel that fails each time.

    python tests/support/jobs/failing_kernels.py OUT RANK STEP DIVIDE

In the process RANK a kernel of `emu:1` fails some kernels after the start of step STEP of four.
DIVIDE is "owners" or "nothing". Rank 0 writes the trainings' fingerprints to OUT; None where a
training has ended with an error.
"""

import contextlib
import os
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import emu
import evenstep
from evenstep.errors import DeviceLostError, PeerError
from zoo import build, make_batches

out, rank, at, divide = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4]
emu.load(Path(__file__).parents[3] / "build")


def train(kernels):
    emu.configure()
    layout = evenstep.Layout(divide=evenstep.Owners() if divide == "owners" else ())
    model = build("batch_norm")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), devices="emu:0,emu:1", shards=8, layout=layout
    ) as trainer:
        for number, (X, y) in enumerate(make_batches((33, 16, 30, 24))):
            if number == at and int(os.environ["RANK"]) == rank:
                emu.fail_after(1, kernels)
            trainer.step(X, y)
        return trainer.fingerprint()


fingerprints = []
for kernels in range(1, 150, 3):
    fingerprints.append(None)
    with contextlib.suppress(DeviceLostError, PeerError, torch.AcceleratorError):
        fingerprints[-1] = train(kernels)
if os.environ["RANK"] == "0":
    torch.save(fingerprints, out)
