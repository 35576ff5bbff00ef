"""What is to be reached: ratios of two contenders' speeds, and two absolute bounds."""

from __future__ import annotations

import dataclasses

STEP_OVERHEAD_MS = 0.7
UNEVEN_SHARE = 0.9
NETWORK_EXCHANGE_SHARE = 0.8
SHARED_EXCHANGE_SHARE = 0.3
HYBRIDIZED_GAIN = 1.6
PROCESSES_OVER_DDP = {"lenet": 1.0, "resnet18": 0.97}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ratio:
    """A row of ratios: `ours` over `theirs`, to be `at_least` (None: told for information).

    Attributes:
        text: what is compared.
        ours: key of a contender.
        theirs: likewise.
        at_least: the target.
    """

    text: str
    ours: str
    theirs: str
    at_least: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gain(Ratio):
    """A ratio that says what a choice brings.

    Attributes:
        bits: what the choice does to them.
    """

    bits: str


_OTHER = "others; the same on any devices"
_SAME = "the same"
GAINS: dict[str, tuple[Gain, ...]] = {
    "lenet": (
        Gain(
            text='images channels-last (the rule of `memory_format="auto"`), two devices',
            ours="lenet.evenstep.2.v8.n256",
            theirs="lenet.evenstep.2.v8.n256.contiguous",
            bits=_OTHER,
        ),
        Gain(
            text="freed memory kept for the next step, as a trainer does (here: a plain loop)",
            ours="lenet.plain.1.channels_last.keeps",
            theirs="lenet.plain.1.channels_last",
            bits=_SAME,
        ),
        Gain(
            text="`hybridize`, one device",
            ours="lenet.evenstep.1.v8.n256.hybridized",
            theirs="lenet.evenstep.1.v8.n256",
            at_least=1.1,
            bits=_OTHER,
        ),
        Gain(
            text="`hybridize`, two devices",
            ours="lenet.evenstep.2.v8.n256.hybridized",
            theirs="lenet.evenstep.2.v8.n256",
            at_least=1.1,
            bits=_OTHER,
        ),
        Gain(
            text="two steps in flight",
            ours="lenet.evenstep.2.v8.n256.flight2",
            theirs="lenet.evenstep.2.v8.n256",
            bits=_SAME,
        ),
    ),
    "resnet18": (
        Gain(
            text="`hybridize`, two devices",
            ours="resnet18.evenstep.2.v8.n128.hybridized",
            theirs="resnet18.evenstep.2.v8.n128",
            bits=_OTHER,
        ),
        Gain(
            text="bf16 autocast, two devices",
            ours="resnet18.evenstep.2.v8.n128.bf16",
            theirs="resnet18.evenstep.2.v8.n128",
            bits=_OTHER,
        ),
        Gain(
            text="two steps in flight",
            ours="resnet18.evenstep.2.v8.n128.flight2",
            theirs="resnet18.evenstep.2.v8.n128",
            bits=_SAME,
        ),
    ),
}
BATCH_NORM = Gain(
    text='`batch_norm="sync"` over "shard", two devices',
    ours="resnet18.evenstep.2.v8.n128.sync",
    theirs="resnet18.evenstep.2.v8.n128",
    bits=_OTHER,
)
RATIOS: dict[str, tuple[Ratio, ...]] = {
    "lenet": (
        Ratio(
            text="two devices over one, V = 8",
            ours="lenet.evenstep.2.v8.n256",
            theirs="lenet.evenstep.1.v8.n256",
            at_least=1.85,
        ),
        Ratio(
            text="two devices over DDP as its documentation says",
            ours="lenet.evenstep.2.v8.n256",
            theirs="lenet.ddp.2.contiguous",
            at_least=1.4,
        ),
        Ratio(
            text="two devices over Accelerate as its documentation says",
            ours="lenet.evenstep.2.v8.n256",
            theirs="lenet.accelerate.2.contiguous",
            at_least=1.4,
        ),
        Ratio(
            text="two devices over Lightning Fabric as its documentation says",
            ours="lenet.evenstep.2.v8.n256",
            theirs="lenet.fabric.2.contiguous",
            at_least=1.4,
        ),
        Ratio(
            text="two devices over DDP given the same layout (channels-last)",
            ours="lenet.evenstep.2.v8.n256",
            theirs="lenet.ddp.2.channels_last",
            at_least=0.98,
        ),
        Ratio(
            text="the same, DDP with a malloc that keeps freed memory, as evenstep's does",
            ours="lenet.evenstep.2.v8.n256",
            theirs="lenet.ddp.2.channels_last.keeps",
            at_least=0.98,
        ),
        Ratio(
            text="V = 8 over V = 2, two devices",
            ours="lenet.evenstep.2.v8.n256",
            theirs="lenet.evenstep.2.v2.n256",
            at_least=0.92,
        ),
        Ratio(
            text="two devices over one, V = 8, contiguous",
            ours="lenet.evenstep.2.v8.n256.contiguous",
            theirs="lenet.evenstep.1.v8.n256.contiguous",
        ),
        Ratio(
            text="two devices over DDP, both contiguous",
            ours="lenet.evenstep.2.v8.n256.contiguous",
            theirs="lenet.ddp.2.contiguous",
        ),
        Ratio(
            text="one device, V = 8, over a plain loop on one thread, both channels-last",
            ours="lenet.evenstep.1.v8.n256",
            theirs="lenet.plain.1.channels_last",
        ),
        Ratio(
            text="the same, the plain loop with a malloc that keeps freed memory",
            ours="lenet.evenstep.1.v8.n256",
            theirs="lenet.plain.1.channels_last.keeps",
        ),
        Ratio(
            text="two devices, V = 8, over a plain loop on two threads, both channels-last",
            ours="lenet.evenstep.2.v8.n256",
            theirs="lenet.plain.2.channels_last",
        ),
    ),
    "resnet18": (
        Ratio(
            text="two devices (128 examples) over one (64), V = 8",
            ours="resnet18.evenstep.2.v8.n128",
            theirs="resnet18.evenstep.1.v8.n64",
            at_least=1.85,
        ),
        Ratio(
            text="two devices over one, the same 128 examples, V = 8",
            ours="resnet18.evenstep.2.v8.n128",
            theirs="resnet18.evenstep.1.v8.n128",
            at_least=1.85,
        ),
        Ratio(
            text="two devices over DDP as its documentation says",
            ours="resnet18.evenstep.2.v8.n128",
            theirs="resnet18.ddp.2.contiguous",
            at_least=1.0,
        ),
        Ratio(
            text="two devices over Accelerate as its documentation says",
            ours="resnet18.evenstep.2.v8.n128",
            theirs="resnet18.accelerate.2.contiguous",
            at_least=1.0,
        ),
        Ratio(
            text="two devices over Lightning Fabric as its documentation says",
            ours="resnet18.evenstep.2.v8.n128",
            theirs="resnet18.fabric.2.contiguous",
            at_least=1.0,
        ),
        Ratio(
            text="two devices over DDP given the same layout (channels-last)",
            ours="resnet18.evenstep.2.v8.n128",
            theirs="resnet18.ddp.2.channels_last",
            at_least=1.0,
        ),
        Ratio(
            text="the same, DDP with a malloc that keeps freed memory, as evenstep's does",
            ours="resnet18.evenstep.2.v8.n128",
            theirs="resnet18.ddp.2.channels_last.keeps",
            at_least=1.0,
        ),
        Ratio(
            text="V = 8 over V = 2, two devices",
            ours="resnet18.evenstep.2.v8.n128",
            theirs="resnet18.evenstep.2.v2.n128",
            at_least=0.97,
        ),
        Ratio(
            text="V = 8 over V = 2, one device",
            ours="resnet18.evenstep.1.v8.n64",
            theirs="resnet18.evenstep.1.v2.n64",
        ),
        Ratio(
            text="one device, V = 8, over a plain loop on one thread (contiguous)",
            ours="resnet18.evenstep.1.v8.n64",
            theirs="resnet18.plain.1.contiguous",
        ),
        Ratio(
            text="two devices over one, bf16",
            ours="resnet18.evenstep.2.v8.n128.bf16",
            theirs="resnet18.evenstep.1.v8.n64.bf16",
        ),
    ),
}
