"""How a batch eight times as large affects accuracy, and how scaling the learning rate helps.

    python examples/large_batch.py

More devices invite larger batches. With the same learning rate, a larger batch means fewer steps of
the same size, so an epoch learns less. The rate can be scaled with the batch size, after a warm-up.
None of this depends on the devices: the number of shards is the same in all rows.
"""

import sys

import torch

import evenstep
from evenstep.data import Loader, digits

BASE, LARGE, RATE = 32, 256, 0.02
ROWS = [
    ("small batch", BASE, None, 0),
    ("large batch, the same rate", LARGE, None, 0),
    ("large batch, rate x 2.8 (square root)", LARGE, "sqrt", 0),
    ("large batch, rate x 8 (linear)", LARGE, "linear", 0),
    ("large batch, rate x 8, warmed up", LARGE, "linear", 15),
]


def accuracy_after(epochs, batch_size, rule, warmup_steps):
    """Train LeNet on digits and return its test accuracy after each epoch."""
    torch.manual_seed(0)
    net = evenstep.models.lenet()
    for layer in net.modules():
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(layer.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    scheduler = rule and evenstep.scale_lr(
        optimizer,
        base_batch_size=BASE,
        batch_size=batch_size,
        rule=rule,
        warmup_steps=warmup_steps,
    )
    test = Loader(digits(train=False), 256, shuffle=False)
    found = []
    with evenstep.Trainer(net, optimizer, torch.nn.CrossEntropyLoss(), shards=8) as trainer:
        for _ in range(epochs):
            for X, y in trainer.epoch(Loader(digits(), batch_size)):
                trainer.step(X, y)
                if scheduler:
                    scheduler.step()
            found.append(trainer.evaluate(test, {"a": evenstep.metrics.accuracy})["a"])
    return found


if __name__ == "__main__":
    for label, *choices in ROWS:
        accuracies = accuracy_after(int(sys.argv[1]) if len(sys.argv) > 1 else 10, *choices)
        print(f"{label:36}", " ".join(f"{accuracy:.2f}" for accuracy in accuracies))
