"""Trains in several processes, and prints how many steps each callback was told of."""

import os
import sys
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import evenstep
from evenstep.callbacks import Callback
from trainers import sgd
from zoo import build, make_batches


class Counts(Callback):
    def __init__(self, *, every_process):
        self.every_process = every_process
        self.steps = 0

    def on_step(self, record):
        self.steps += 1


first, each = Counts(every_process=False), Counts(every_process=True)
model = build("convolution")
with evenstep.Trainer(
    model, sgd(model), nn.CrossEntropyLoss(), devices=1, callbacks=[first, each]
) as trainer:
    for batch in make_batches((24, 17, 24)):
        trainer.step(*batch)
rank = os.environ["RANK"]
# One write, so that no line of the other process comes between.
sys.stdout.write(f"rank {rank} first {first.steps}\nrank {rank} each {each.steps}\n")
sys.stdout.flush()
