"""Models for the command line: `--model cli_models:Net`. Most of them misbehave."""

import os
import random
import signal
import threading

import torch
from torch import nn

SHARDS = 8  # the default; on one device the number of calls then tells step and shard


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(784, 10)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x.flatten(1))

    def is_at(self, step, shard):
        return self.calls == step * SHARDS + shard


class Interrupted(Net):
    """Presses Ctrl-C in the middle of step 5, later than any copy that the checks make."""

    def forward(self, x):
        if self.is_at(step=5, shard=3):
            os.kill(os.getpid(), signal.SIGINT)
        return super().forward(x)


class Diverges(Net):
    """Its loss is NaN in step 4, shard 5."""

    def forward(self, x):
        factor = torch.nan if self.is_at(step=4, shard=5) else 1
        return super().forward(x) * factor


class Breaks(Net):
    """Raises in step 2, with a message of two lines."""

    def forward(self, x):
        if self.is_at(step=2, shard=0):
            raise RuntimeError("out of ideas\nand of memory")
        return super().forward(x)


class BreaksInRankOne(Net):
    """Raises in one of several processes, some steps after the start."""

    def forward(self, x):
        if os.environ.get("RANK") == "1" and self.calls == 20:
            raise RuntimeError("rank 1 has a problem of its own")
        return super().forward(x)


class DrawsFromRandom(Net):
    def forward(self, x):
        return super().forward(x) * (1 + random.random())


class Scaled(Net):
    """A shard's scale depends on the device that computes it."""

    def forward(self, x):
        return super().forward(x) * (2 if "cpu:1" in threading.current_thread().name else 1)


class Uncopyable(Net):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def unfit():
    return nn.Linear(3, 3)


def no_module():
    return 3


def without_parameters():
    return nn.Flatten()


def raises():
    raise KeyError("no such\nthing")


not_a_function = 3


class Normalised(nn.Sequential):
    """Has batch normalisation."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(784, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))


class Hashing(Net):
    """Begins with the hash of a string, which differs from process to process."""

    def __init__(self):
        super().__init__()
        nn.init.constant_(self.layer.bias, hash("a name") % 1009 / 1009)
