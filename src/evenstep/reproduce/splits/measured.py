"""The same training, split over devices in one of several ways, in a fresh process.

The network is a multilayer perceptron whose hidden layers are computed as slices: that belongs to
the experiment, so each way must end with the same fingerprint. Every device has memory of its own,
as GPUs have, so that what is exchanged can be counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import evenstep
from evenstep.bench.workload import each_ms
from evenstep.stages.plan import find_stages

WAYS = {
    "data": evenstep.Layout(),
    "stages": evenstep.Layout(divide=evenstep.Stages("balanced")),
    "slices": evenstep.Layout(divide=evenstep.Slices()),
}
"""The layout for each way."""

LINES = {"data": 1, "stages": 1, "slices": 2}
"""The lines that a program for one device changes: the trainer's options, and `slice_`."""

INPUTS, CLASSES = 784, 10
_WARM_UP = 2  # steps


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of one way on some devices, for each of the job's widths.

    Returns:
        "fingerprints" after the last step, "examples_per_s" (of the median step), "nbytes" and
        "meetings" in a step (None for a way that does not count them), "weight_nbytes" of the
        model and "held_nbytes" of weights on the device besides the first that holds most.
    """
    torch.set_num_threads(1)
    found = [_train(job, width) for width in job["widths"]]
    return {name: [one[name] for one in found] for name in found[0]}


def make_network(width: int, slices: int) -> nn.Module:
    """Return a perceptron with two hidden layers of `width` units, cut into slices."""
    torch.manual_seed(0)
    hidden = (nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    net = nn.Sequential(*hidden, nn.Linear(width, CLASSES))
    return evenstep.nn.slice_(net, slices, layers=["0", "2"])


def _train(job: Mapping[str, Any], width: int) -> dict[str, Any]:
    net = make_network(width, job["slices"])
    torch.manual_seed(1)
    examples, steps = job["batch_size"], _WARM_UP + job["steps"]
    batch = torch.randn(examples, INPUTS), torch.randint(CLASSES, (examples,))
    options: dict[str, Any] = {
        "devices": [f"cpu:{number}:own" for number in range(job["devices"])],
        "shards": job["shards"],
        "layout": WAYS[job["way"]],
    }
    given = net, torch.optim.SGD(net.parameters(), lr=0.01), nn.CrossEntropyLoss()
    with evenstep.Trainer(*given, **options) as trainer:
        steps_ms = each_ms(lambda: trainer.step(*batch), job["steps"], _WARM_UP)
        exchanged = trainer.exchanged
        fingerprint = trainer.fingerprint()
        held = _held_nbytes(job["way"], trainer)
    return {
        "fingerprints": fingerprint,
        "examples_per_s": 1e3 * examples / statistics.median(steps_ms),
        "nbytes": None if exchanged is None else exchanged.nbytes / steps,
        "meetings": None if exchanged is None else exchanged.waits / steps,
        "weight_nbytes": sum(one.nbytes for one in net.parameters()),
        "held_nbytes": held,
    }


def _held_nbytes(way: str, trainer: evenstep.Trainer) -> int:
    """Return the bytes of weights on the device, besides the first, that holds most of them."""
    net, devices = trainer.model, trainer.devices
    if len(devices) == 1:
        return 0
    if trainer.exchanged is not None:
        return max(trainer.exchanged.held.values(), default=0)
    if way == "stages":
        _, *others = find_stages("balanced", net, devices).parameters_of(net)
        return max(sum(one.nbytes for one in own) for own in others)
    return sum(one.nbytes for one in net.parameters())
