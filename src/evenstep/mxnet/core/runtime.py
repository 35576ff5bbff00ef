"""The engine of an MXNet program: opened at the first operation, closed when the program ends.

MXNet's programs have no place for a `with` statement, so this engine belongs to the process.
"""

from __future__ import annotations

import atexit
import functools
import linecache
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from evenstep.devices import Device, gpu_count, kept_memory, usable_cores
from evenstep.engine import Engine, Task, Var
from evenstep.engine.task import PLAIN
from evenstep.mxnet.core.context import Context, cpu


class Place(NamedTuple):
    """A line of the user's program."""

    file: str
    line: int

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()
        return f"{self.file}:{self.line}" + (f" ({text})" if text else "")


def place_here() -> Place:
    """Return the innermost line of the calling program that is not evenstep's own."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("evenstep."):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno)


class Chunk(Var):
    """The memory of arrays: a torch tensor that exists as soon as its first writer has run.

    Arrays that are slices of each other share one chunk, so the engine orders what reads and writes
    them.

    Attributes:
        node: how it was computed, if that was recorded for `backward`.
        spec: shape and dtype of the tensor.
    """

    __slots__ = ("__weakref__", "node", "spec")

    def __init__(self, name: str, value: torch.Tensor | None = None) -> None:
        super().__init__(value, name, _wait)
        self.node: Any = None
        self.spec: Any = None

    def put(self, value: torch.Tensor) -> None:
        """Set the tensor; called by a task that writes the chunk."""
        self._value = value


class Runtime:
    """The engine of the process, and the random generators of its contexts.

    Attributes:
        current_seed: the seed of contexts that have none of their own.
        uses_np: whether loaders give arrays of `np`, after `npx.set_np()`.
    """

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._is_open = False
        self._devices = first_devices()
        self._lanes = {device.name: lane for lane, device in enumerate(self._devices)}
        self._generators: dict[Device, Chunk] = {}
        self._memory = kept_memory()
        self.current_seed = 0
        self.uses_np = False

    def submit(
        self,
        call: Callable[[], object],
        device: Device,
        *,
        name: str,
        reads: Sequence[Chunk] = (),
        writes: Sequence[Chunk] = (),
        copies: bool = False,
        place: Place | None = None,
    ) -> None:
        """Queue a call for a device, after what writes `reads` and what uses `writes`.

        Args:
            call: makes the computation and puts its results into `writes`.
            device: the device whose lane makes the call.
            name: the name of the operation.
            reads: what it reads.
            writes: what it changes.
            copies: use the device's copying lane, which works beside its computing lane.
            place: the line of the program that queued it; None to look for it.
        """
        engine = self._engine_with(device)
        lane = self._lanes[device.name]
        task = Task(
            call,
            lane=engine.copy_lane(lane) if copies else lane,
            name=name,
            category="copy" if copies else "compute",
            reads=reads,
            writes=writes,
            modes=PLAIN,
            story={"queued at": place or place_here()},
        )
        engine.submit_tasks([task])

    def generator(self, device: Device) -> Chunk:
        """Return the random generator of a device, which tasks draw from in order."""
        if device not in self._generators:
            generator = torch.Generator(device.torch_device)
            generator.manual_seed(self.current_seed)
            self._generators[device] = Chunk(f"the generator of {device}", generator)  # type: ignore[arg-type]
        return self._generators[device]

    def seed(self, seed: int, context: Context | None) -> None:
        """Set the seed of a context's generator, or of all present and future ones."""
        if context is None:
            self.current_seed = seed
            self._generators.clear()
        else:
            generator = torch.Generator(context.device.torch_device).manual_seed(seed)
            chunk = Chunk(f"the generator of {context}", generator)  # type: ignore[arg-type]
            self._generators[context.device] = chunk

    def wait(self, chunk: Chunk) -> None:
        """Wait until everything queued so far that writes `chunk` has run; raise its error."""
        if self._engine is not None:
            self._engine.wait_for_var(chunk)

    def waitall(self) -> None:
        """Wait for everything; raise the first error that was not raised yet."""
        if self._engine is not None and self._is_open:
            self._engine.waitall()

    def close(self) -> None:
        """Wait for everything and stop the worker threads; the next operation starts them again."""
        if self._engine is None or not self._is_open:
            return
        self._is_open = False
        atexit.unregister(self.close)
        try:
            self._engine.close()
        finally:
            self._memory.__exit__(None, None, None)

    def _engine_with(self, device: Device) -> Engine:
        """Return the engine; a device that it does not have makes it finish and start anew."""
        if self._engine is None or not self._is_open or device.name not in self._lanes:
            self.close()
            if device.name not in self._lanes:
                self._lanes[device.name] = len(self._devices)
                self._devices = (*self._devices, device)
            self._memory = kept_memory()
            self._memory.__enter__()
            self._engine = Engine(self._devices).__enter__()
            self._is_open = True
            atexit.register(self.close)
        return self._engine


def first_devices() -> tuple[Device, ...]:
    """Return the devices that an engine has from the start: those that programs usually name.

    These are cpu(0) and, without GPUs, stand-ins for them: one for each core, but 2 to 8. Lanes of
    GPUs take memory on them, so they start with the first use of one.
    """
    stand_ins = 0 if gpu_count() else min(8, max(2, usable_cores()))
    return (cpu().device, *(Device("cpu", i, own_memory=True) for i in range(stand_ins)))


@functools.cache
def runtime() -> Runtime:
    """Return the one runtime of this process."""
    return Runtime()


def _wait(chunk: Any) -> None:
    runtime().wait(chunk)


def waitall() -> None:
    """Wait until everything that was queued has run.

    Raises:
        MXNetError: the first error that was not raised yet.
    """
    runtime().waitall()


def close() -> None:
    """Wait for everything and stop the worker threads, which the end of the program does too."""
    runtime().close()
