"""A script that trains with loaders of all kinds, in one process or several.

    torchrun --nproc-per-node 2 tests/support/jobs/loaders.py OUT [KIND ...]
    torchrun --nproc-per-node 2 tests/support/jobs/loaders.py OUT apart KIND
    torchrun --nproc-per-node 2 tests/support/jobs/loaders.py OUT whole

Writes to OUT what every loader has trained; after "apart", how processes with different ones end;
after "whole", what a loop has trained that draws numbers for every example itself.
"""

import json
import logging
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))

import evenstep
import loading
from evenstep.errors import EvenstepError
from grouping import grouped

KINDS = {**loading.KINDS, **loading.OWN}
RANK = int(os.environ.get("RANK", "0"))


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(loading.FEATURES, 8), nn.Dropout(0.3), nn.Linear(8, loading.CLASSES)
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()


def train(trainer, loader, until=None):
    """Train two epochs, or up to a number of steps."""
    with trainer:
        while trainer.cursor.epoch < 2:
            for batch in trainer.epoch(loader):
                trainer.step(*loading.arguments_of(batch))
                if trainer.steps_done == until:
                    return


def trained(kind, out):
    """Train with an interruption in the second epoch; return what came out."""
    options = {"devices": 1, "peer_timeout_s": 20.0}
    first = evenstep.Trainer(*parts(), **grouped(shards=4, **options))
    with first:
        for _ in range(2):
            for batch in first.epoch(KINDS[kind]()):
                first.step(*loading.arguments_of(batch))
                if first.steps_done == 15:
                    first.save(out / kind)
                    break
    torch.manual_seed(RANK + 1)  # processes that differ in what must not matter
    loader = KINDS[kind]()
    resumed = evenstep.Trainer.load(out / kind, *parts(), **grouped(**options))
    train(resumed, loader)
    dataset = getattr(loader, "dataset", None)
    return {"fingerprint": resumed.fingerprint(), "fetched": getattr(dataset, "fetched", None)}


class Short(loading.Generated):
    """Gives fewer batches in rank 1."""

    def __iter__(self):
        batches = list(super().__iter__())
        return iter(batches[: 5 - RANK])


class Listed(loading.Quiet):
    """Files in the order in which a machine lists them: in rank 1 it is another one."""

    def __getitem__(self, index):
        return super().__getitem__((index + 7 * RANK) % len(self))


class Changed(loading.Quiet):
    """In rank 1 the files have other contents."""

    def __getitem__(self, index):
        X, y = super().__getitem__(index)
        return X * (1 + RANK), y


class Odd(loading.Quiet):
    """Draws from a generator that nobody can seed."""

    def __getitem__(self, index):
        X, y = super().__getitem__(index)
        return X + int.from_bytes(os.urandom(1), "big") / 256, y


APART = {
    "listed": lambda: DataLoader(Listed(), 4, shuffle=True),
    "listed, workers": lambda: DataLoader(Listed(), 4, shuffle=True, num_workers=2),
    "listed, collate_fn": lambda: DataLoader(Listed(), 4, collate_fn=loading.masked),
    "listed, own": lambda: evenstep.data.Loader(Listed(), 4),
    "changed": lambda: DataLoader(Changed(), 4, shuffle=True),
    "changed, own": lambda: evenstep.data.Loader(Changed(), 4, num_workers=2),
    "odd": lambda: DataLoader(Odd(), 4, shuffle=True),
    "unseeded": lambda: DataLoader(loading.plain(), 4, sampler=loading.Unseeded()),
    "another length": lambda: loading.KINDS["list"]()[RANK:],
    "another kind": lambda: loading.KINDS["stream" if RANK else "list"](),
    "another order": lambda: DataLoader(loading.plain(), 4, sampler=range(RANK, 40 + RANK)),
    "other batches": lambda: [(X + RANK, y) for X, y in loading.KINDS["list"]()],
    "ends early": Short,
}


def ended(kind):
    """Return the error of processes whose loaders differ, and the steps done."""
    trainer = evenstep.Trainer(
        *parts(), devices=1, shards=4, faults=evenstep.Faults(peer_timeout_s=10.0)
    )
    told = "nothing"
    try:
        train(trainer, APART[kind](), until=20)
    except EvenstepError as error:
        told = f"{type(error).__name__}: {error}"
    return [told, trainer.steps_done]


def with_noise():
    """Train on whole batches with noise that the loop draws; return the fingerprint."""
    with evenstep.Trainer(*parts(), devices=1, shards=4) as trainer:
        while trainer.cursor.epoch < 2:
            for X, y in trainer.epoch(loading.KINDS["quiet"](), whole=True):
                trainer.step(X + 0.1 * torch.randn_like(X), y)
    return trainer.fingerprint()


def main():
    """Train, and write the results of this rank."""
    out, kinds = Path(sys.argv[1]), sys.argv[2:]
    lines = Lines()
    logging.getLogger("evenstep").addHandler(lines)
    if kinds[:1] == ["apart"]:
        found = ended(kinds[1])
    elif kinds == ["whole"]:
        found = {"fingerprint": with_noise(), "lines": lines.lines}
    else:
        found = {kind: trained(kind, out) for kind in kinds}
        found["lines"] = lines.lines
    (out / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
