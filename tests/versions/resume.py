"""Writes a checkpoint in the middle of an epoch, or resumes those that other versions wrote.

    python resume.py write FOLDER         # FOLDER is the checkpoint's
    python resume.py resume FOLDER ...    # prints a line of JSON for each

It prints the fingerprints of the checkpoint's step and of the last step, and what evenstep logs.
"""

from __future__ import annotations

import json
import logging
import sys

import torch
from torch import nn

import evenstep
from evenstep.data import Loader, digits

STOPS_AFTER, STEPS = 3, 7


def parts():
    """Return a model with buffers and random numbers, an optimizer with state, and a loss."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
        *(nn.Dropout(0.2), nn.LazyLinear(10)),
    )
    model(torch.zeros(2, *digits().tensors[0].shape[1:]))
    return model, torch.optim.Adam(model.parameters(), lr=0.01), nn.CrossEntropyLoss()


def train(trainer, until):
    """Train up to a step; return the fingerprint there."""
    while trainer.steps_done < until:
        for batch in trainer.epoch(Loader(digits(), batch_size=300, seed=1)):
            trainer.step(*batch)
            if trainer.steps_done == until:
                break
    return trainer.fingerprint()


def write(folder):
    with evenstep.Trainer(*parts(), seed=4, devices=2) as trainer:
        opened = train(trainer, STOPS_AFTER)
        trainer.save(folder)
        return {"opened": opened, "closed": train(trainer, STEPS)}


def resume(folder):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("evenstep").addHandler(handler)
    try:
        with evenstep.Trainer.load(folder, *parts(), devices=1) as trainer:
            found = {"opened": trainer.fingerprint(), "closed": train(trainer, STEPS)}
    except evenstep.EvenstepError as error:
        found = {"refused": str(error)}
    logging.getLogger("evenstep").removeHandler(handler)
    return {**found, "said": lines}


if __name__ == "__main__":
    what, *folders = sys.argv[1:]
    for one in folders:
        print(json.dumps({"write": write, "resume": resume}[what](one)), flush=True)
