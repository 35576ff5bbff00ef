"""The experiment: all choices that a result depends on, as opposed to the devices."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import get_args

import torch

from evenstep.arithmetic import is_portable_here
from evenstep.devices import Device, carry
from evenstep.errors import InputError, shown
from evenstep.limits import (
    MOST_SHARDS,
    MOST_THREADS,
    Arithmetic,
    BatchNorm,
    BufferRule,
    MemoryFormat,
    Precision,
)
from evenstep.options.checks import Options, check_choice, check_flag, check_integer, check_positive

_MOST_DIMS = 64  # of a tensor, in torch

LATER = {"later": True}
"""The metadata of fields that version 0.1.0 did not have: a checkpoint leaves them out where they
have their default, so that it stays as that version wrote it, byte for byte."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Experiment(Options):
    """The choices that a result depends on, besides model, optimizer and data.

    Attributes:
        shards: V, the number of shards that every minibatch is cut into; at most 65,536.
        seed: seed of all random ops in the model.
        precision: "fp32" computes in the dtype of the parameters, "bf16" with autocast.
        memory_format: order of the dimensions of input tensors in memory. "preserve": as in the
            batch; "contiguous"; "channels_last": images (4 dimensions) channels-last.
        threads: number of intra-op threads of each device; at most 1,024.
        compile: compile the forward and backward pass of shards, where that is possible.
        batch_norm: "shard": BatchNorm layers normalise with the statistics of each shard during
            training; "sync": with those of the whole batch.
        separable: whether the objective must add up over shards: two shards together give the sum
            of their totals and of their counts. False accepts any objective, and then the result
            depends on the number of shards.
        buffers: how to combine the values that shards write to a buffer, by the buffer's name (or
            a pattern such as "*.queue"): "mean", "first", "sum", "max", "min" or "refuse".
        batch_dim: the dimension that the examples of a batch lie along: 1 for batches of shape
            (time, batch, features). A tensor that has no such dimension (labels of shape (batch,))
            is cut along its first.
        clip_norm: the largest norm of a batch's mean gradient, over all parameters; a larger one is
            scaled down to it, as by `torch.nn.utils.clip_grad_norm_`. None for no limit.
        arithmetic: "torch" computes with torch's own kernels, whose bits depend on the model of the
            processor; "portable" with evenstep's, which have the same bits on every processor, on
            CPUs, in float32 (see docs/portable.md). Left out, it is "portable" inside
            `with evenstep.portable()`, and "torch" elsewhere.
    """

    shards: int = 8
    seed: int = 0
    precision: Precision = "fp32"
    memory_format: MemoryFormat = "preserve"
    threads: int = 1
    compile: bool = False
    batch_norm: BatchNorm = "shard"
    separable: bool = dataclasses.field(default=True, metadata=LATER)
    buffers: dict[str, BufferRule] = dataclasses.field(
        default_factory=dict, hash=False, metadata=LATER
    )
    batch_dim: int = dataclasses.field(default=0, metadata=LATER)
    clip_norm: float | None = dataclasses.field(default=None, metadata=LATER)
    arithmetic: Arithmetic = dataclasses.field(default="torch", metadata=LATER)

    def __post_init__(self) -> None:
        if "arithmetic" not in self.given and is_portable_here():
            object.__setattr__(self, "arithmetic", "portable")
            object.__setattr__(self, "given", self.given | {"arithmetic"})
        check_integer("shards", self.shards, at_least=1, at_most=MOST_SHARDS)
        check_integer("threads", self.threads, at_least=1, at_most=MOST_THREADS)
        check_integer("seed", self.seed, at_least=0, at_most=None)
        check_integer("batch_dim", self.batch_dim, at_least=0, at_most=_MOST_DIMS)
        if self.clip_norm is not None:
            check_positive("clip_norm", self.clip_norm)
            object.__setattr__(self, "clip_norm", float(self.clip_norm))  # as checkpoints have it
        for name in ("compile", "separable"):
            check_flag(name, getattr(self, name))
        if not isinstance(self.buffers, dict):
            raise InputError(f"got buffers={shown(self.buffers)}: give a dict of names and rules")
        for name, rule in self.buffers.items():
            check_choice(f"buffers[{name!r}]", rule, get_args(BufferRule))
        check_choice("precision", self.precision, ("fp32", "bf16"))
        check_choice("memory_format", self.memory_format, get_args(MemoryFormat))
        check_choice("batch_norm", self.batch_norm, ("shard", "sync"))
        check_choice("arithmetic", self.arithmetic, get_args(Arithmetic))

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype for autocast; None without autocast."""
        return torch.bfloat16 if self.precision == "bf16" else None

    def placement(self, device: Device) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that copies an input tensor to `device`, in its memory format."""
        if self.memory_format == "channels_last":
            return lambda tensor: carry(tensor, device, _last_if_images(tensor))
        preserve = self.memory_format == "preserve"
        layout = torch.preserve_format if preserve else torch.contiguous_format
        if not device.is_accelerator:
            # What `carry` does on CPUs, without a call into Python for each tensor.
            target = device.torch_device
            return operator.methodcaller("to", target, copy=True, memory_format=layout)
        return lambda tensor: carry(tensor, device, layout)


def _last_if_images(tensor: torch.Tensor) -> torch.memory_format:
    return torch.channels_last if tensor.ndim == 4 else torch.contiguous_format


def autocast(kind: str, precision: torch.dtype | None) -> AbstractContextManager[object]:
    """Return a context that computes in `precision`.

    Autocast's cache of cast weights is off. It is shared by the process, and leaving autocast in
    one lane clears it for all lanes. So with the cache, whether a tied weight is cast once or
    twice, and where its gradient is rounded, would depend on timing.
    """
    if precision is None:
        return nullcontext()
    return torch.autocast(kind, dtype=precision, cache_enabled=False)
