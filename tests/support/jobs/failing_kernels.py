"""A script that trains in two processes again and again, with another kernel that fails each time.

    python tests/support/jobs/failing_kernels.py OUT RANK STEP DIVIDE SINCE

In the process RANK a kernel of `emu:1` fails in step STEP of four, some kernels after SINCE: the
"start" of the step, or the moment when a partial sum is copied away from there ("sum"). DIVIDE is
"owners" or "nothing". Rank 0 writes the trainings' fingerprints to OUT; None where a training has
ended with an error.
"""

import contextlib
import os
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import emu
import emu.backend
import evenstep
from evenstep.errors import DeviceLostError, PeerError
from evenstep.shard import partial_sum
from zoo import build, make_batches

out, rank, at, divide, since = sys.argv[1], *map(int, sys.argv[2:4]), *sys.argv[4:]
ARMED = []  # how many kernels after the next copy of a partial sum one fails
moved = partial_sum._moved


def moved_and_failing(value, replica):
    if ARMED and value.replica.device.index == 1:
        emu.fail_after(1, ARMED.pop())
    return moved(value, replica)


partial_sum._moved = moved_and_failing
emu.load(Path(__file__).parents[3] / "build")
emu.backend.register()


def train(kernels):
    emu.configure()
    ARMED.clear()
    layout = evenstep.Layout(divide=evenstep.Owners() if divide == "owners" else ())
    model = build("batch_norm")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), devices="emu:0,emu:1", shards=8, layout=layout
    ) as trainer:
        for number, (X, y) in enumerate(make_batches((33, 16, 30, 24))):
            if number == at and int(os.environ["RANK"]) == rank:
                if since == "sum":
                    ARMED.append(kernels)
                else:
                    emu.fail_after(1, kernels)
            trainer.step(X, y)
        return trainer.fingerprint()


fingerprints = []
for kernels in range(12) if since == "sum" else range(1, 150, 3):
    fingerprints.append(None)
    with contextlib.suppress(DeviceLostError, PeerError, torch.AcceleratorError):
        fingerprints[-1] = train(kernels)
if os.environ["RANK"] == "0":
    torch.save(fingerprints, out)
