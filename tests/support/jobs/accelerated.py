"""A script that trains on emulated accelerators, in one process or several.

    python tests/support/jobs/accelerated.py OUT MODE DEVICES DIVIDE STEPS_IN_FLIGHT

DIVIDE is "nothing", "owners", "stages" or "stages,owners". Rank 0 writes the weights, the losses
and the fingerprint to OUT.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import emu
import emu.backend
import evenstep
from zoo import build, make_batches

out, mode, devices, divide, in_flight = sys.argv[1:]
divide = "" if divide == "nothing" else divide
emu.load(Path(__file__).parents[3] / "build")
emu.configure(mode)
emu.backend.register()
model = build("batch_norm")
DIVIDED = {"owners": evenstep.Owners(), "stages": evenstep.Stages("balanced")}
with evenstep.Trainer(
    model,
    torch.optim.Adam(model.parameters(), lr=0.01),
    nn.CrossEntropyLoss(),
    devices=devices,
    layout=evenstep.Layout(
        divide=tuple(DIVIDED[one] for one in divide.split(",") if one in DIVIDED)
    ),
    max_in_flight=int(in_flight),
) as trainer:
    losses = [*map(float, [trainer.step(X, y) for X, y in make_batches((33, 16, 30))])]
    fingerprint = trainer.fingerprint()
if os.environ.get("RANK", "0") == "0":
    torch.save((emu.on_the_host(model.state_dict()), losses, fingerprint), out)
