"""Contexts: the devices of an MXNet program, `cpu(0)` or `gpu(1)`.

Without GPUs, `gpu(i)` stands for a CPU device of the engine with lanes of its own, so that programs
for several GPUs run anywhere.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import logging

from evenstep.devices import Device, gpu_count, try_gpu
from evenstep.errors import DeviceError

logger = logging.getLogger("evenstep")


@dataclasses.dataclass(frozen=True, repr=False)
class Context:
    """A device of an MXNet program; `with context:` makes it the default for new arrays.

    Attributes:
        device_type: "cpu" or "gpu".
        device_id: its number, from 0.
    """

    device_type: str
    device_id: int = 0

    def __post_init__(self) -> None:
        if self.device_type not in ("cpu", "gpu", "cpu_pinned", "cpu_shared"):
            raise DeviceError(f"got a context of type {self.device_type!r}: use cpu(i) or gpu(i)")
        if not isinstance(self.device_id, int) or self.device_id < 0:
            raise DeviceError(f"got device_id={self.device_id!r}: give an integer from 0")

    @property
    def device(self) -> Device:
        """The device of the engine that stands for it.

        Raises:
            DeviceError: this machine has GPUs, but not this one.
        """
        if self.device_type != "gpu":
            return _cpu_device(self.device_id)
        return _gpu_device(self.device_id, gpu_count())

    def empty_cache(self) -> None:
        """Do nothing: torch and the C library decide what memory they keep."""

    def __enter__(self) -> Context:
        """Make it the default context."""
        _ENTERED.set((*_ENTERED.get(), self))
        return self

    def __exit__(self, *exception: object) -> None:
        """Make the earlier one the default context again."""
        _ENTERED.set(_ENTERED.get()[:-1])

    def __repr__(self) -> str:
        return f"{self.device_type}({self.device_id})"


_ENTERED: contextvars.ContextVar[tuple[Context, ...]] = contextvars.ContextVar(
    "contexts", default=()
)


def cpu(device_id: int = 0) -> Context:
    """Return a CPU context. Each one has a worker thread of its own."""
    return Context("cpu", device_id)


def gpu(device_id: int = 0) -> Context:
    """Return a GPU, or without GPUs its stand-in: a CPU device with a worker thread of its own."""
    return Context("gpu", device_id)


def num_gpus() -> int:
    """Return the number of GPUs that torch sees; stand-ins are not counted."""
    return gpu_count()


def current_context() -> Context:
    """Return the default context: that of the innermost `with`, otherwise `cpu(0)`."""
    entered = _ENTERED.get()
    return entered[-1] if entered else cpu()


@functools.cache
def _cpu_device(number: int) -> Device:
    return Device("cpu", number)


@functools.cache
def _gpu_device(number: int, gpus: int) -> Device:
    if number < gpus:
        return try_gpu(number)
    if gpus:
        there = "gpu(0)" if gpus == 1 else f"gpu(0) to gpu({gpus - 1})"
        raise DeviceError(
            f"got gpu({number}), but this machine has {there}: use one of these, or cpu()"
        )
    _note_stand_in()
    return Device("cpu", number, own_memory=True)


@functools.cache
def _note_stand_in() -> None:
    logger.warning(
        "torch sees no GPU: gpu(0), gpu(1), ... are CPU devices with a worker thread each"
    )
