"""What arguments accept: choices and largest values, which help texts show without torch."""

from __future__ import annotations

from typing import Literal, TypeAlias

Precision: TypeAlias = Literal["fp32", "bf16"]
Arithmetic: TypeAlias = Literal["torch", "portable"]
MemoryFormat: TypeAlias = Literal["preserve", "contiguous", "channels_last"]
BatchNorm: TypeAlias = Literal["shard", "sync"]

BufferRule: TypeAlias = Literal["mean", "first", "sum", "max", "min", "refuse"]
"""A rule that the user can give for a buffer that shards change.

    mean     the mean over the examples of the batch
    first    the value after the first shard
    sum      the opening value plus the changes of all shards
    max      the largest value after any shard, element by element
    min      the smallest value after any shard, element by element
    refuse   no shard may change it
"""

MOST_SHARDS = 65_536
"""The largest number of shards of a batch; every step makes a list of all of them."""

MOST_EXAMPLES = 2**31 - 1
"""The largest number of examples of a batch."""

MOST_DEVICES = 1024
"""The largest number of devices of a process: each CPU device has two threads of its own."""

MOST_THREADS = 1024
"""The largest number of intra-op threads of a device: torch crashes with far more."""

MOST_IN_FLIGHT = 1_000
"""The largest number of steps in flight."""

MOST_SECONDS = 31_536_000
"""The longest time that can be given: a year."""

MODELS = ("lenet", "resnet18", "mlp")
"""The names of the built-in models."""

TEXT_NETWORKS = ("chargpt", "chargpt-small", "bert")
"""The names of the networks for text that `evenstep bench` measures."""

BOOK_EXPERIMENTS = (
    *("hybridize", "queued", "waiting", "memory", "together", "copies"),
    *("lenet", "resnet18", "sixteen", "mxnet", "splits"),
)
"""The names of the experiments that `evenstep reproduce` runs."""
