"""A script whose processes may compute differently, and what ends each of its trainings.

    torchrun --nproc-per-node 2 tests/support/jobs/differing.py OUT WHAT ...

Writes for each rank and WHAT the error, or the fingerprint of a training without one.
"""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import evenstep
from evenstep.data import Loader, digits
from evenstep.errors import EvenstepError
from grouping import grouped

RANK = int(os.environ.get("RANK", "0"))
EXAMPLES = torch.utils.data.TensorDataset(*(part[:160] for part in digits(train=True).tensors))
SCALES = {"north": 1.0, "east": 3.0e-5, "south": -1.0e5, "west": 7.0e-3, "up": 1.0e5}
TINY = 2.0**-8


class Places(nn.Module):
    """A classifier of pictures that multiplies its scores by `scale()`."""

    def __init__(self, scale, *, sparse=False):
        super().__init__()
        torch.manual_seed(0)
        self.scale = scale
        self.factor = 1.0
        self.embedding = nn.Embedding(17, 6, sparse=sparse)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.1)
        self.linear = nn.Linear(6, 10)

    def forward(self, X, *more):
        values = (X * 16).long().clamp(0, 16).flatten(1)
        hidden = self.norm(self.embedding(values[:, ::7]).mean(1))
        return self.linear(self.drop(hidden)) * self.scale(X) * self.factor


def one(X):
    """Compute the same in every process."""
    return 1.0


def by_rank(X):
    """Compute differently in another process than the first."""
    return 1.0 + TINY * RANK


def by_last(X):
    """Compute differently in the third process."""
    return 1.0 + TINY * (RANK == 2)


def by_set(X):
    """Add up numbers in the order of a set of strings."""
    total = torch.zeros(())
    for name in set(SCALES):
        total = total + SCALES[name]
    return total


UPDATES = []  # how many steps this process has taken


def later(X):
    """Compute differently in another process once two steps are taken."""
    return by_rank(X) if len(UPDATES) >= 2 else 1.0


def failing(X):
    """Fail in another process than the first, for the first example of the data."""
    if RANK and bool((X[0] == EXAMPLES.tensors[0][0]).all()):
        raise RuntimeError("rank 1 can't compute this shard")
    return 1.0


def never(X):
    """Fail in every process."""
    raise RuntimeError("nobody can compute this")


def whole(trainer):
    """Train on batches that every process is given."""
    for lo in range(0, 160, 32):
        X, y = EXAMPLES[lo : lo + 32]
        trainer.step(X, y)


def loaded(trainer):
    """Train on the part of each batch that this process has loaded."""
    for X, y in trainer.epoch(Loader(EXAMPLES, 32, seed=1)):
        trainer.step(X, y)


def asked_for(trainer):
    """Train on whole batches of a loader."""
    for X, y in trainer.epoch(Loader(EXAMPLES, 32, seed=1), whole=True):
        trainer.step(X, y)


def divided(trainer):
    """Train on micro-batches of the script's own, each with a nesting of its own."""
    for lo in range(0, 160, 32):
        parts = [EXAMPLES[lo + at : lo + at + 8] for at in range(0, 32, 8)]
        trainer.step(evenstep.Shards([(*parts[0], "note"), *parts[1:]]))


def single(trainer):
    """Train on batches of one shard, which one of the processes computes."""
    for lo in range(0, 160, 32):
        trainer.step(evenstep.Shards([EXAMPLES[lo : lo + 32]]))


def nested(trainer):
    """Train on batches with a constant, and with a tensor that all shards share."""
    for lo in range(0, 160, 32):
        X, y = EXAMPLES[lo : lo + 32]
        trainer.step({"X": X, "weight": 0.5}, evenstep.shared(torch.ones(3)), y)


def measure(model, X, *more):
    """Return the summed loss of a shard, whatever its batch is nested in."""
    X = X["X"] if isinstance(X, dict) else X
    y = next(one for one in reversed(more) if isinstance(one, torch.Tensor))
    return nn.functional.cross_entropy(model(X), y, reduction="sum"), len(y)


def train(scale, loop, **options):
    """Train; return what ended it, or the fingerprint."""
    UPDATES.clear()
    model = Places(scale, sparse=options.pop("sparse", False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"devices": 1, "after_update": UPDATES.append, "peer_timeout_s": 30.0, **options}
    trainer = evenstep.Trainer(model, optimizer, **grouped(objective=measure, **options))
    try:
        with trainer:
            loop(trainer)
            return trainer.fingerprint()
    except (EvenstepError, RuntimeError) as error:
        return f"{type(error).__name__} after {trainer.steps_done}: {error}"


LOOPS = {"whole": whole, "loaded": loaded, "asked for": asked_for, "divided": divided}
LOOPS |= {"single": single, "nested": nested}


def in_evaluation_mode(trainer):
    """Train on the same batches, in another mode in one process."""
    trainer.model.train(not RANK)
    whole(trainer)


def with_a_number(trainer):
    """Train on the same batches, with another number in one process."""
    trainer.model.factor = 0.5 + TINY * RANK
    whole(trainer)


CASES = {
    "mode": (one, in_evaluation_mode, {}),
    "number": (one, with_a_number, {}),
    **{f"{name}, by rank": (by_rank, loop, {}) for name, loop in LOOPS.items()},
    **{f"{name}, alike": (one, loop, {}) for name, loop in LOOPS.items()},
    "sparse, by rank": (by_rank, whole, {"sparse": True}),
    "sparse, alike": (one, whole, {"sparse": True}),
    "in flight, by rank": (by_rank, whole, {"max_in_flight": 2}),
    "in flight, alike": (one, whole, {"max_in_flight": 2}),
    "whole, by last": (by_last, whole, {}),
    "by set": (by_set, whole, {}),
    "later": (later, whole, {}),
    "later, every 3": (later, whole, {"check": "every 3"}),
    "off": (by_rank, whole, {"check": "off"}),
    "off in one": (one, whole, {"check": "off" if RANK else "first"}),
    "failing": (failing, whole, {}),
    "never": (never, whole, {}),
}


def main():
    """Run the named cases, and write what came of each."""
    out, *names = sys.argv[1:]
    found = {
        name: train(scale, loop, **options)
        for name in names or CASES
        for scale, loop, options in [CASES[name]]
    }
    (Path(out) / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
