"""What each way of splitting a network costs in a step, by arithmetic: bytes, waits, seconds.

The network is a multilayer perceptron (inputs, width, width, classes): its weights grow with the
square of the width, and its activations with the width. The formulas are those of the ways' papers:

    data      Each device computes batch/D examples. Each sends and receives 2 · (D − 1)/D of the
              gradients (a ring all-reduce; Patarasuk and Yuan, 2009).
    stages    Device d has the layers of stage d, and sends activations, and gets their gradients
              back (Huang et al., "GPipe", 2019). With V micro-batches, a step takes (V + D − 1)/V
              times as long as without waiting.
    slices    Every device has a D-th of each layer's outputs. Each layer's input goes to all, and
              outputs and gradients come back (Shoeybi et al., "Megatron-LM", 2019).

Every device keeps its weights, so that only activations or gradients are sent. Sending does not
overlap with computing. So these are bounds, and the experiment measures what is really reached.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal, TypeAlias

Way: TypeAlias = Literal["data", "stages", "slices"]

WAYS: tuple[Way, ...] = ("data", "stages", "slices")

_BYTES = 4  # of a number in single precision
_PASSES = 3  # products of a layer in a step: forward, and the gradients of input and weight
_LARGEST_WIDTH = 1 << 20


@dataclasses.dataclass(frozen=True)
class Link:
    """What connects two devices."""

    name: str
    bytes_per_s: float  # that a device sends, while it receives as many
    latency_s: float  # until a message's first byte has come; a round number, not measured


LINKS = (
    Link("1 Gbit/s", 1e9 / 8, 50e-6),
    Link("10 Gbit/s", 10e9 / 8, 20e-6),
    Link("100 Gbit/s", 100e9 / 8, 5e-6),
    Link("NVLink", 450e9, 2e-6),  # of the fourth generation, one way
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Perceptron:
    """A multilayer perceptron, and how it is trained."""

    width: int  # the units of each of the two hidden layers
    batch: int  # examples in a step
    shards: int = 8  # V, the shards or micro-batches of a step
    inputs: int = 784  # the numbers in an example
    classes: int = 10  # the outputs

    @property
    def layers(self) -> list[tuple[int, int]]:
        """The inputs and outputs of each layer."""
        return list(itertools.pairwise((self.inputs, self.width, self.width, self.classes)))

    @property
    def parameters(self) -> int:
        """The number of weights and biases."""
        return sum(inputs * outputs + outputs for inputs, outputs in self.layers)

    @property
    def operations(self) -> float:
        """Multiplications and additions in a step, forward and backward."""
        return 2.0 * _PASSES * self.batch * sum(one * other for one, other in self.layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What a way of splitting costs in a step."""

    nbytes: float  # that the device with the most to send and to receive sends and receives
    waits: int  # how often devices wait for each other, one after another
    idle: float = 0.0  # the share of the step in which a device waits for its turn

    def seconds(self, network: Perceptron, devices: int, link: Link, speed: float) -> float:
        """Return the seconds of a step, where a device computes `speed` operations a second."""
        compute_s = network.operations / devices / speed / (1 - self.idle)
        return compute_s + self.nbytes / link.bytes_per_s + self.waits * link.latency_s


def cost(way: Way, network: Perceptron, devices: int) -> Cost:
    """Return what a way of splitting costs on `devices` devices; nothing is sent by one device."""
    others = devices - 1
    if not others:
        return Cost(nbytes=0, waits=0)
    if way == "data":
        gradients = _BYTES * network.parameters
        return Cost(nbytes=2 * gradients * others / devices, waits=2 * others)
    if way == "stages":
        # The cut with most to send is that of the widest activations: a hidden layer's. They go to
        # the next stage, and to the one before.
        sends = 2 if devices > 2 else 1
        nbytes = sends * _BYTES * network.batch * network.width
        return Cost(nbytes=nbytes, waits=2 * others, idle=others / (network.shards + others))
    # Of both hidden layers: x out and y back; then dy out and dx back, from every other device.
    sliced = network.layers[:-1]
    whole = sum(inputs for inputs, _ in sliced)
    cut = sum(outputs for _, outputs in sliced) / devices
    inner = whole - network.inputs  # the data need no gradient
    most = max(others * (whole + cut), others * (cut + inner))
    return Cost(nbytes=_BYTES * network.batch * most, waits=2 * len(sliced) * network.shards)


def first_width(
    way: Way, rival: Way | None, link: Link, speed: float, *, batch: int, devices: int = 2
) -> int | None:
    """Return the smallest width, a power of two, from which a way is faster than a rival.

    Args:
        way: how the network is split.
        rival: a different way; None for one device alone.
        link: what connects the devices.
        speed: operations a second of one device.
        batch: examples in a step.
        devices: the number of devices.

    Returns:
        The width; None if the rival is as fast at the largest width of 2²⁰.
    """

    def wins(width: int) -> bool:
        network = Perceptron(width=width, batch=batch)
        ours = cost(way, network, devices).seconds(network, devices, link, speed)
        others = devices if rival is not None else 1
        theirs = cost(rival or way, network, others).seconds(network, others, link, speed)
        return ours < theirs

    width = _LARGEST_WIDTH
    if not wins(width):
        return None
    while width > 1 and wins(width // 2):
        width //= 2
    return width
