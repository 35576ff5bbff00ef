"""A script that trains on emulated accelerators, in one process or several.

    python tests/support/jobs/accelerated.py OUT MODE DEVICES

Rank 0 writes the state of the training to OUT.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import emu
import evenstep
from reference import whole_state
from zoo import build, make_batches

out, mode, devices = sys.argv[1:]
emu.load(Path(__file__).parents[3] / "build")
emu.configure(mode)
model = build("convolution")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), devices=devices) as trainer:
    losses = [float(trainer.step(X, y)) for X, y in make_batches((33, 16, 30))]
if os.environ.get("RANK", "0") == "0":
    state = emu.on_the_host(whole_state(model, optimizer))
    torch.save((state, losses), out)
