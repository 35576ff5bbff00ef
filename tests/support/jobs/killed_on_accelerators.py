"""A training on emulated accelerators that goes on from its checkpoints until it is killed.

    python tests/support/jobs/killed_on_accelerators.py FOLDER DEVICES MODE IN_FLIGHT KILLED_AT

It saves after every step, in the background. KILLED_AT is the number of the shard at whose forward
pass the process is killed, in the midst of its kernels; 0 for never. At the end it prints the
fingerprint.
"""

import itertools
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import emu
import evenstep
from zoo import build, make_batches

folder, devices, mode, in_flight, killed_at = sys.argv[1:]
emu.load(Path(__file__).parents[3] / "build")
emu.configure(mode, seed=int(killed_at))
shards = itertools.count(1)


def objective(model, X, y):
    output = model(X)
    if next(shards) == int(killed_at):
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(output, y, reduction="sum"), len(y)


model = build("batch_norm")
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
is_begun = any(Path(folder).glob("step-*"))
options = {"objective": objective, "devices": devices, "max_in_flight": int(in_flight)}
if is_begun:
    trainer = evenstep.Trainer.load(folder, model, optimizer, **options)
else:
    trainer = evenstep.Trainer(model, optimizer, **options)
with trainer:
    batches = make_batches((33, 16, 30, 24, 33, 16))
    for X, y in itertools.islice(batches, trainer.steps_done, None):
        trainer.step(X, y)
        trainer.save(folder, background=True)
    print(trainer.fingerprint())
