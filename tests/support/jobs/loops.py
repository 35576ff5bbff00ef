"""A script whose loops do not take one step for each batch, or differ between its processes.

torchrun --nproc-per-node 2 tests/support/jobs/loops.py OUT [CALL IN_FLIGHT]

Writes to OUT what every loop has trained; with CALL, what ends the loop of that name.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[1]))

import evenstep
from evenstep.data import Cursor, Loader, digits
from evenstep.errors import EvenstepError
from evenstep.metrics import accuracy
from grouping import grouped

RANK = int(os.environ.get("RANK", "0"))
EXAMPLES = TensorDataset(*(tensor[:200] for tensor in digits(train=True).tensors))
LOADER = Loader(EXAMPLES, 8, seed=1)  # 25 batches
ROWS = Loader(torch.utils.data.Subset(EXAMPLES, range(200)), 8, seed=1, num_workers=2)
METRICS = {"accuracy": lambda model, X, y: accuracy(model(X), y)}


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


def evaluating_whole(trainer):
    """Evaluate whole batches of all sizes while a part of a batch is in hand."""
    rows = DataLoader(EXAMPLES, 7)
    for X, y in trainer.epoch(LOADER):
        trainer.step(X, y)
        for size in range(1, 10):
            assert len(trainer.predict([EXAMPLES.tensors[0][:size]])) == size
        if trainer.cursor.step == 5:
            trainer.evaluate(rows, METRICS)
            trainer.evaluate([(X, y)], METRICS)


def predicting_alike(trainer):
    """Predict for the part in hand, whose examples are the same in all processes."""
    examples = TensorDataset(*(one[:1].repeat(32, *one[0].ndim * [1]) for one in EXAMPLES.tensors))
    for X, y in trainer.epoch(Loader(examples, 8, shuffle=False)):
        assert len(trainer.predict([X])) == 8
        trainer.step(X, y)


def breaking_off(trainer):
    """Begin an epoch again in its middle."""
    for stop in (3, 9, 30):
        for X, y in trainer.epoch(LOADER):
            trainer.step(X, y)
            if trainer.steps_done == stop:
                break


LOOPS = (skipping, skipping_fetched, repeating, evaluating, evaluating_whole)
LOOPS += (predicting_alike, breaking_off)


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


def train_on(trainer, loader, steps=8):
    for _, (X, y) in zip(range(steps), loader, strict=False):
        trainer.step(X, y)


def distributed_sampler(trainer):
    """Give every process the batches of its own half of the data."""
    sampler = DistributedSampler(EXAMPLES, num_replicas=int(os.environ["WORLD_SIZE"]), rank=RANK)
    train_on(trainer, DataLoader(EXAMPLES, 8, sampler=sampler))


def unseeded_shuffle(trainer):
    """Shuffle by a seed that the processes do not share."""
    torch.manual_seed(RANK)
    train_on(trainer, DataLoader(EXAMPLES, 8, shuffle=True))


def one_of_three_shuffles(trainer):
    """Let the last process alone shuffle."""
    train_on(trainer, DataLoader(EXAMPLES, 8, shuffle=RANK == 2))


def other_later(trainer):
    """Let the data of the processes part after the first steps."""
    train_on(trainer, LOADER.epoch(Cursor()), steps=3)
    train_on(trainer, Loader(EXAMPLES, 8, seed=RANK).epoch(Cursor()))


def evaluate_others(trainer):
    """Evaluate another half of the data in each process."""
    train_on(trainer, LOADER.epoch(Cursor()), steps=3)
    trainer.evaluate([*LOADER][RANK::2], METRICS)


def predict_others(trainer):
    """Predict batches of which the third differs."""
    train_on(trainer, LOADER.epoch(Cursor()), steps=3)
    trainer.predict([(X + (number == 2) * RANK,) for number, (X, y) in enumerate(LOADER)])


def other_shared(trainer):
    """Share another tensor in each process, beside the batches of an epoch."""
    for X, y in trainer.epoch(LOADER):
        trainer.step(X, y, evenstep.shared(torch.full((10,), 1.0 + RANK)))


def save_in_one(trainer):
    """Save in the first process only."""
    train_on(trainer, LOADER.epoch(Cursor()), steps=3)
    if RANK == 0:
        trainer.save(Path(sys.argv[1]) / "saved")
    train_on(trainer, LOADER.epoch(Cursor()), steps=3)


def save_in_one_at_the_end(trainer):
    """Save in the first process only, after the last step."""
    train_on(trainer, LOADER.epoch(Cursor()), steps=3)
    if RANK == 0:
        trainer.save(Path(sys.argv[1]) / "saved")


def evaluate_in_one(trainer):
    """Evaluate a list of batches in the first process only."""
    train_on(trainer, LOADER.epoch(Cursor()), steps=3)
    if RANK == 0:
        trainer.evaluate([*LOADER][:2], METRICS)
    train_on(trainer, LOADER.epoch(Cursor()), steps=3)


def evaluate_loader_in_one(trainer):
    """Evaluate a loader in the last process only."""
    train_on(trainer, LOADER.epoch(Cursor()), steps=3)
    if RANK == 1:
        trainer.evaluate(LOADER, METRICS)
    train_on(trainer, LOADER.epoch(Cursor()), steps=3)


def predict_in_one(trainer):
    """Predict in the first process, save in the other."""
    if RANK == 0:
        trainer.predict([*LOADER][:2])
    else:
        trainer.save(Path(sys.argv[1]) / "saved")


def fewer_batches(trainer):
    """Evaluate more batches in one process than in the other."""
    trainer.evaluate([*LOADER][: 2 + RANK], METRICS)
    train_on(trainer, LOADER.epoch(Cursor()), steps=3)


CALLS = {
    function.__name__: function
    for function in (
        one_skips,
        one_begins_behind,
        distributed_sampler,
        unseeded_shuffle,
        one_of_three_shuffles,
        other_later,
        other_shared,
        evaluate_others,
        predict_others,
        save_in_one,
        save_in_one_at_the_end,
        evaluate_in_one,
        evaluate_loader_in_one,
        predict_in_one,
        fewer_batches,
    )
}


def weighted(model, X, y, weights=None):
    return nn.functional.cross_entropy(model(X), y, weights, reduction="sum"), len(y)


def opened(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.Dropout(0.2), nn.Linear(8, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return evenstep.Trainer(
        model,
        optimizer,
        **grouped(objective=weighted, devices=1, shards=4, peer_timeout_s=10.0, **options),
    )


def result_of(loop):
    with opened() as trainer:
        loop(trainer)
        return [trainer.fingerprint(), trainer.steps_done, str(trainer.cursor)]


def error_of(call, max_in_flight):
    """Return what ended a loop: the seconds, the error, the steps done, whether nothing moved."""
    began_s = time.monotonic()
    trainer = opened(max_in_flight=max_in_flight, check_every=5)
    told = "nothing"
    try:
        with trainer:
            CALLS[call](trainer)
    except (EvenstepError, LookupError, RuntimeError) as error:
        told = f"{type(error).__name__}: {error}"
    return [time.monotonic() - began_s, told, trainer.steps_done, trainer.fingerprint()]


def main():
    """Train, and write the results of this rank."""
    out, call = Path(sys.argv[1]), sys.argv[2:]
    found = error_of(call[0], int(call[1])) if call else {f.__name__: result_of(f) for f in LOOPS}
    (out / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
