"""A script whose loops do not take one step for each batch, or differ between its processes.

torchrun --nproc-per-node 2 tests/support/jobs/loops.py OUT [CALL]

Writes to OUT what every loop has trained; with CALL, what ends the loop in which rank 1 does that.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

import evenstep
from evenstep.data import Loader, digits
from evenstep.errors import EvenstepError
from evenstep.metrics import accuracy

RANK = int(os.environ.get("RANK", "0"))
EXAMPLES = TensorDataset(*(tensor[:200] for tensor in digits(train=True).tensors))
LOADER = Loader(EXAMPLES, 8, seed=1)  # 25 batches
ROWS = Loader(torch.utils.data.Subset(EXAMPLES, range(200)), 8, seed=1, workers=2)
METRICS = {"accuracy": accuracy}


def skipping(trainer):
    """Skip some batches."""
    for epoch in range(3):
        for number, (X, y) in enumerate(trainer.epoch(LOADER)):
            if number % 3 != epoch:
                trainer.step(X, y)


def skipping_fetched(trainer):
    """Skip batches that worker processes fetch ahead."""
    for X, y in trainer.epoch(ROWS):
        if trainer.cursor.step > 10:
            trainer.step(X, y)


def repeating(trainer):
    """Take many steps for each batch."""
    for X, y in trainer.epoch(LOADER):
        for _ in range(14):
            trainer.step(X, y)


def evaluating(trainer):
    """Evaluate while a batch is in hand."""
    for X, y in trainer.epoch(LOADER):
        if trainer.cursor.step % 10 == 0:
            trainer.evaluate(LOADER, METRICS)
        trainer.step(X, y)


def breaking_off(trainer):
    """Begin an epoch again in its middle."""
    for stop in (3, 9, 30):
        for X, y in trainer.epoch(LOADER):
            trainer.step(X, y)
            if trainer.steps_done == stop:
                break


LOOPS = (skipping, skipping_fetched, repeating, evaluating, breaking_off)


def one_skips(trainer):
    """Draw batches of which rank 1 skips one."""
    for number, (X, y) in enumerate(trainer.epoch(LOADER)):
        if (RANK, number) != (1, 3):
            trainer.step(X, y)


def one_begins_behind(trainer):
    """Draw a batch more in one process than in the other."""
    for _, (X, y) in zip(range(3 + RANK), trainer.epoch(LOADER), strict=False):
        if trainer.steps_done < 2:
            trainer.step(X, y)
    next(trainer.epoch(LOADER))


CALLS = {function.__name__: function for function in (one_skips, one_begins_behind)}


def opened():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.Dropout(0.2), nn.Linear(8, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), devices=1, shards=4, peer_timeout_s=10.0
    )


def result_of(loop):
    with opened() as trainer:
        loop(trainer)
        return [trainer.fingerprint(), trainer.steps_done, str(trainer.cursor)]


def error_of(call):
    began_s = time.monotonic()
    try:
        with opened() as trainer:
            CALLS[call](trainer)
        return [0.0, "nothing"]
    except EvenstepError as error:
        return [time.monotonic() - began_s, f"{type(error).__name__}: {error}"]


def main():
    """Train, and write the results of this rank."""
    out, calls = Path(sys.argv[1]), sys.argv[2:]
    found = [error_of(call) for call in calls] or [{f.__name__: result_of(f) for f in LOOPS}]
    (out / f"{RANK}.json").write_text(json.dumps(found[0]))


if __name__ == "__main__":
    main()
