"""Random models with parameters and buffers at random addresses, trained in several layouts.

As a program, it trains those with the seeds from the first argument to before the second one, and
prints the seeds of those whose bits differ from a plain loop over aligned clones.
"""

import copy
import sys
from pathlib import Path

import torch
from torch import nn

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent)]

import evenstep
from places import WAYS, Peeled, Projected, aligned_clone, generator, in_array, odd_copy
from reference import bits_of, reference_training, whole_state

LAYOUTS = [1, 2, ["cpu:0", "cpu:1:own"], ["cpu:0:own", "cpu:1:own", "cpu:2"]]
SHARDS, EXAMPLES, STEPS, CLASSES = 4, 13, 2, 5


class Recurrent(nn.Module):
    """Reads each row as a sequence of numbers."""

    def __init__(self, width, kind):
        super().__init__()
        self.layer = kind(1, width, batch_first=True)

    def forward(self, x):
        return self.layer(x[:, :, None])[0][:, -1]


class Attentive(nn.Module):
    """Reads each row as a sequence of numbers, and attends to them."""

    def __init__(self, width):
        super().__init__()
        self.spread = nn.Linear(1, width)
        self.layer = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x):
        x = self.spread(x[:, :, None])
        return self.layer(x, x, x, need_weights=False)[0].mean(1)


class Twice(nn.Module):
    """A product of each row with itself."""

    def __init__(self, width, outputs):
        super().__init__()
        self.layer = nn.Bilinear(width, width, outputs)

    def forward(self, x):
        return self.layer(x, x)


class Convolved(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.layer = nn.Conv1d(1, channels, 3, padding=1)

    def forward(self, x):
        return self.layer(x[:, None]).mean(2)


def layer(rng, width):
    """Return a random layer for rows of a width, and the width of what it returns."""
    outputs = rng.randrange(2, 30)
    found = {
        "linear": lambda: nn.Linear(width, outputs, bias=rng.random() < 0.5),
        "peeled": lambda: Peeled(width, outputs),
        "projected": lambda: Projected(width),
        "twice": lambda: Twice(width, outputs),
        "norm": lambda: nn.LayerNorm(width),
        "batch norm": lambda: nn.BatchNorm1d(width),
        "gru": lambda: Recurrent(outputs, nn.GRU),
        "lstm": lambda: Recurrent(outputs, nn.LSTM),
        "attention": lambda: Attentive(outputs),
        "convolution": lambda: Convolved(outputs),
    }
    kind = rng.choice([*found])
    return found[kind](), width if kind in ("projected", "norm", "batch norm") else outputs


def build(seed):
    rng = generator(seed)
    torch.manual_seed(seed)
    width = inputs = rng.randrange(3, 20)
    layers = []
    for _ in range(rng.randrange(1, 5)):
        made, width = layer(rng, width)
        layers += [made, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES)), inputs


def place(model, rng):
    """Give parameters and buffers random addresses; return what the user holds on to."""
    kept = [rng.choice(WAYS)(model, rng)]
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            put = rng.choice([odd_copy, in_array, None])
            if put is not None and buffer.is_floating_point():
                setattr(module, name, put(buffer, rng.randrange(16)))
                kept.append(getattr(module, name).data if rng.random() < 0.5 else None)
    return kept


def optimizer_of(seed):
    kinds = [
        lambda own: torch.optim.SGD(own, 0.1, momentum=0.9),
        lambda own: torch.optim.Adam(own, 0.01),
    ]
    return kinds[seed % len(kinds)]


def train(seed, devices):
    """Train the model of a seed in a layout; return its state."""
    model, inputs = build(seed)
    rng = generator(f"{seed} {devices}")
    kept = place(model, rng)
    optimizer = optimizer_of(seed)(model.parameters())
    with evenstep.Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        devices=devices,
        shards=SHARDS,
        max_in_flight=rng.choice([1, 1, 2]),
        experiment=evenstep.Experiment(memory_format="contiguous"),
    ) as trainer:
        for step, (X, y) in enumerate(batches(seed, inputs)):
            if step and rng.random() < 0.3:
                trainer.waitall()
                one = rng.choice([*model.parameters()])
                one.data = odd_copy(one, rng.randrange(16))
            trainer.step(X, y)
    del kept
    return whole_state(model, optimizer)


def batches(seed, inputs):
    torch.manual_seed(seed)
    return [
        (torch.randn(EXAMPLES, inputs), torch.randint(0, CLASSES, (EXAMPLES,)))
        for _ in range(STEPS)
    ]


def difference(seed):
    """Return what differs in a layout from a plain loop; None if nothing does."""
    model, inputs = build(seed)
    expected, _ = reference_training(
        aligned_clone(copy.deepcopy(model)), optimizer_of(seed), batches(seed, inputs),
        shards=SHARDS,
    )  # fmt: skip
    for devices in LAYOUTS:
        found = train(seed, devices)
        for name, value in expected.items():
            if bits_of(torch.as_tensor(found[name])) != bits_of(torch.as_tensor(value)):
                return f"seed {seed} on {devices}: {name}"
    return None


def differences(seeds):
    return [found for found in map(difference, seeds) if found is not None]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("differences:", differences(range(*map(int, sys.argv[1:]))))
