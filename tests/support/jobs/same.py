"""A script as a user writes it: it trains, and writes what came of it. One process or many.

    torchrun --nproc-per-node 2 tests/support/jobs/same.py OUT 1,1 8 2 plain

OUT is a folder for each rank's results, then the devices of each rank, V, the steps in flight, and
how gradients go: "plain" as for small models, all at once; "memory" and "network" in tiny buckets,
each as soon as it is final.
"""

import functools
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

import evenstep
from evenstep.checkpoint.fingerprint import tensor_digest
from evenstep.data import Loader, digits
from evenstep.distributed.machines import reduce
from evenstep.distributed.shared import reduce as shared_reduce
from evenstep.metrics import accuracy
from grouping import grouped
from zoo import ZOO, Momentum, Recomputed, SparseInPlaces, build, follow, make_batches, options_of

ADAM = functools.partial(torch.optim.Adam, lr=0.01)
SGD = functools.partial(torch.optim.SGD, lr=0.1)
SIZES = {7: (21, 19), 8: (33, 16, 30, 24)}
TINY_BYTES = 200
LAST = (16, 3)  # fewer examples than shards


class Rows(Dataset):
    """The digits one by one, as a user's data set gives them; it knows which were asked for."""

    def __init__(self, examples):
        self.examples = examples
        self.seen = []

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        self.seen.append(index)
        return self.examples[index]


def trained(model, optimizer, sizes, options):
    """Train on batches that every process has; return the fingerprint and the losses."""
    options = {**options_of(model), **options}
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **grouped(**options)) as trainer:
        losses = [float(loss) for loss in [trainer.step(X, y) for X, y in make_batches(sizes)]]
        return [trainer.fingerprint(), losses]


def on_whole_batches(name, sizes, options):
    """Train a model of the zoo."""
    model = build(name)
    return trained(model, ADAM(model.parameters()), sizes, options)


def on_sparse_gradients(options):
    """Train a model whose gradients are sparse in some shards."""
    model = SparseInPlaces()
    return trained(model, SGD(model.parameters()), (61, 64, 1, 2), options)


class LargeTable(nn.Module):
    """Looks words up in a table that is kept as rows, or uses all of it in some shards."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(140_000, 4), nn.Linear(4, 3)

    def forward(self, ids):
        rows = self.table(ids)
        return self.head((self.table.weight[ids] if ids[0, 0] == 0 else rows).mean(1))


def on_a_large_table(options):
    """Train a large embedding, of which each shard uses a few rows."""
    model = LargeTable()
    optimizer, loss = SGD(model.parameters(), momentum=0.9), nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(1)
    with evenstep.Trainer(model, optimizer, loss, **grouped(**options)) as trainer:
        losses = []
        for size in (64, 33, 1):
            X = torch.randint(1, 50, (size, 6), generator=generator)
            X[:, 3:] *= 2_500
            X[48:49, 0] = 0  # the first example of a shard, if V = 8
            y = torch.randint(0, 3, (size,), generator=generator)
            losses.append(float(trainer.step(X, y)))
        return [trainer.fingerprint(), losses]


def on_gradients_added_to_twice(options):
    """Train a model one of whose gradients is not final when it looks so."""
    model = Recomputed()
    return trained(model, SGD(model.parameters()), (40, 33), options)


def on_a_momentum_encoder(options):
    """Train a model that `after_update` writes to."""
    model = Momentum()
    options = {"after_update": follow, **options}
    return trained(model, ADAM(model.parameters()), (40, 33), options)


def on_an_embedding_and_short_batches(options):
    """Train an embedding whose rows repeat in each example; some batches fill a single shard."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 5, sparse=True), nn.Flatten(), nn.Linear(60, 3))
    optimizer = SGD(model.parameters())
    generator = torch.Generator().manual_seed(1)
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **grouped(**options)) as trainer:
        losses = []
        for size in (1, 33, 1, 2):
            X = torch.randint(0, 9, (size, 12), generator=generator)
            y = torch.randint(0, 3, (size,), generator=generator)
            losses.append(float(trainer.step(X, y)))
            losses.append(float(trainer.backward(evenstep.Shards([(X, y)]))))
            optimizer.step()
        return [trainer.fingerprint(), losses]


def on_outputs(options):
    """Train by `backward` on an objective with outputs; return fingerprint, losses and outputs."""
    model = build("convolution")
    optimizer = ADAM(model.parameters())
    found = []
    with evenstep.Trainer(
        model, optimizer, **grouped(objective=with_outputs, **options)
    ) as trainer:
        for X, y in make_batches((40, 33)):
            loss = trainer.backward(X, y)
            optimizer.step()
            outputs = loss.outputs
            digests = [tensor_digest(outputs[name]) for name in ("rows", "mean")]
            found.append([float(loss), outputs["right"], *digests])
        return [trainer.fingerprint(), found]


def on_own_shards(options):
    """Train on micro-batches of several sizes; return the fingerprint and the losses."""
    model = build("convolution")
    optimizer = ADAM(model.parameters())
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **grouped(**options)) as trainer:
        losses = []
        for X, y in make_batches((40, 33)):
            sizes = [7, 2, 11, 5, len(y) - 25]
            parts = [*zip(X.split(sizes), y.split(sizes), strict=True)]
            losses.append(float(trainer.step(evenstep.Shards(parts))))
        return [trainer.fingerprint(), losses]


def with_outputs(model, X, y):
    """Return outputs of each kind besides the loss."""
    scores = model(X)
    outputs = {
        "rows": scores,
        "mean": (scores.sum(0), len(y)),
        "right": (scores.argmax(1) == y).sum(),
    }
    return nn.functional.cross_entropy(scores, y, reduction="sum"), len(y), outputs


def on_digits(options):
    """Train an epoch on digits of which each process fetches its own; return what is measured."""
    examples = TensorDataset(*(tensor[:203] for tensor in digits(train=True).tensors))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    rows = Rows(examples)
    with evenstep.Trainer(
        model, ADAM(model.parameters()), nn.CrossEntropyLoss(), **grouped(**options)
    ) as trainer:
        for X, y in trainer.epoch(Loader(examples, 50, seed=1)):
            trainer.step(X, y)
        for X, y in trainer.epoch(Loader(rows, 50, seed=1)):
            trainer.step(X, y)
        measured = trainer.evaluate(Loader(examples, 64, shuffle=False), {"accuracy": accuracy})
        output, label = trainer.predict(Loader(rows, 64, seed=5, drop_last=True), forward)
        assert label.equal(examples.tensors[1])
        predicted = tensor_digest(output)
        return [trainer.fingerprint(), measured, predicted], sorted(rows.seen)


def forward(model, X, y):
    """Return the output beside the label, which tells the order."""
    return model(X), y


def main():
    """Train everything, and write the results of this rank."""
    out, layout, shards, in_flight = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5])
    way = sys.argv[5] if len(sys.argv) > 5 else "plain"
    if way != "plain":
        reduce.BUCKET_BYTES, shared_reduce.SMALL_BYTES = TINY_BYTES, 0
    if way == "network":
        reduce.SharedMemoryReducer = reduce.NetworkReducer
    rank = int(os.environ.get("RANK", "0"))
    devices = int(layout.split(",")[rank])
    options = {"devices": devices, "shards": shards, "max_in_flight": in_flight}
    results = {name: on_whole_batches(name, SIZES[shards], options) for name in ZOO}
    results["dropout, few examples"] = on_whole_batches("dropout", LAST, options)
    results["sparse gradients"] = on_sparse_gradients(options)
    results["embedding"] = on_an_embedding_and_short_batches(options)
    results["large table"] = on_a_large_table(options)
    results["added to twice"] = on_gradients_added_to_twice(options)
    results["momentum encoder"] = on_a_momentum_encoder(options)
    results["outputs"] = on_outputs(options)
    results["own shards"] = on_own_shards(options)
    results["digits"], seen = on_digits(options)
    (out / f"{rank}.json").write_text(json.dumps({"results": results, "seen": seen}))


if __name__ == "__main__":
    main()
