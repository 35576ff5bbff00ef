"""Data-parallel LeNet from scratch: raw tensors, a copy of the parameters per device, one sum.

    python examples/from_scratch.py 2

After "Training on Multiple GPUs" of Dive into Deep Learning, with one change that makes the result
independent of the number of devices: a batch is split into SHARDS parts instead of one part per
device, and the gradients of the parts are added in one fixed order.
"""

import sys

import torch
from torch.nn import functional as F

import evenstep
from evenstep.collectives import tree_sum
from evenstep.d2l import Timer, accuracy, get_params, lenet
from evenstep.data import Cursor, Loader, digits

SHARDS, BATCH_SIZE, LEARNING_RATE, EPOCHS = 8, 64, 0.1, 5
SHAPES = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)]


def init_params():
    """Return weights (normal, with He's standard deviation) and biases (zero) of LeNet."""
    torch.manual_seed(0)
    fans = [9, 0, 500, 0, 800, 0, 128, 0]
    return [
        torch.randn(shape) * (2 / fan) ** 0.5 if fan else torch.zeros(shape)
        for shape, fan in zip(SHAPES, fans, strict=True)
    ]


def gradients_of(params, X, y):
    """Return the gradients of a shard's summed loss; runs in the lane of the shard's device."""
    return torch.autograd.grad(F.cross_entropy(lenet(X, params), y, reduction="sum"), params)


def sgd(params, sums, examples):
    """Update one device's copy of the parameters; runs in that device's lane."""
    with torch.no_grad():
        for param, total in zip(params, sums, strict=True):
            param -= LEARNING_RATE * total / examples


def train_batch(engine, X, y, device_params):
    """Split the batch, compute gradients in parallel, sum them, and update every copy."""
    devices = engine.devices
    found = []
    for shard, (part, labels) in enumerate(
        zip(X.tensor_split(SHARDS), y.tensor_split(SHARDS), strict=True)
    ):
        where = shard * len(devices) // SHARDS
        X_shard, y_shard = part.clone(), labels.clone()  # each shard has its own memory
        found.append(
            engine.submit(
                gradients_of, device_params[where], X_shard, y_shard, device=devices[where]
            )
        )
    by_param = zip(*(shard.result() for shard in found), strict=True)
    sums = [tree_sum(gradients, torch.add) for gradients in by_param]
    for device, params in zip(devices, device_params, strict=True):
        engine.submit(sgd, params, sums, len(X), device=device)
    engine.waitall()


def main(count):
    """Train on `count` devices and return the parameters."""
    batches, held_out = Loader(digits(), BATCH_SIZE), digits(train=False).tensors
    with evenstep.Engine([f"cpu:{number}:own" for number in range(count)]) as engine:
        device_params = [get_params(init_params(), device) for device in engine.devices]
        for epoch in range(EPOCHS):
            timer = Timer()
            for X, y in batches.epoch(Cursor(epoch)):
                train_batch(engine, X, y, device_params)
            with torch.no_grad():
                right = accuracy(lenet(held_out[0], device_params[0]), held_out[1])
            share = right / len(held_out[1])
            print(f"epoch {epoch + 1}, {timer.stop():.1f} sec, test accuracy {share:.3f}")
    return device_params[-1]


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
