"""A task: a call to be made in a lane, with its story.

Torch's modes (grad mode, autocast) belong to a thread. A task runs in another thread than the one
that submitted it, but must compute what it would have computed there.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch

from evenstep.engine.graph import Place
from evenstep.engine.schedule import Job
from evenstep.errors import DeviceLostError

_AUTOCAST_KINDS = ("cpu", "cuda")


class Modes(NamedTuple):
    """The modes of a thread that change what an op does.

    Attributes:
        grad: whether ops are recorded for the backward pass.
        inference: whether inference mode is on.
        autocast: for the CPU and CUDA, the dtype that autocast computes in; None if it is off.
    """

    grad: bool
    inference: bool
    autocast: tuple[torch.dtype | None, ...]


def current_modes() -> Modes:
    """Return the modes of the calling thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    on_cpu, on_cuda = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    if grad and not (inference or on_cpu or on_cuda):
        return PLAIN
    cpu = torch.get_autocast_dtype("cpu") if on_cpu else None
    return Modes(grad, inference, (cpu, torch.get_autocast_dtype("cuda") if on_cuda else None))


@contextlib.contextmanager
def in_modes(modes: Modes) -> Iterator[None]:
    """Put the calling thread into `modes`, whatever it is in, and back at the end.

    Autocast's cache of cast weights belongs to the process, and the end of autocast in one thread
    clears it for all, so it stays off.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(modes.inference))
        stack.enter_context(torch.set_grad_enabled(modes.grad))
        for kind, dtype in zip(_AUTOCAST_KINDS, modes.autocast, strict=True):
            if dtype is not None:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            elif torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


PLAIN = Modes(grad=True, inference=False, autocast=(None,) * len(_AUTOCAST_KINDS))
"""The modes of a new thread."""


class Task(Job):
    """A call and what came of it.

    Attributes:
        modes: what it is called in; those of the submitting thread, unless given.
        name: what it is called in errors and in the trace.
        category: what its seconds count as: "compute", "sum", "update", "copy", or a name of the
            user's.
        story: more to say about it: the step, the shard.
        sources: the handles and Vars that it was given.
        result: what the call returned.
        error: what it raised; for a task that was not run, why not.
        traceback: where it raised it.
        seen: whether somebody was told of the error, or none but whoever submitted it shall be.
        ran_on: the lane that it ran on.
        after: with GPUs: events behind what the submitting thread had launched there.
        fence: on a GPU: the event behind what the task has launched.
        wakes: what is to be set at its end.
    """

    __slots__ = (
        "after",
        "arguments",
        "category",
        "context",
        "error",
        "fence",
        "function",
        "modes",
        "name",
        "ran_on",
        "result",
        "seen",
        "sources",
        "story",
        "traceback",
        "wakes",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...] = (),
        *,
        lane: int | None = None,
        run: int | None = None,
        name: str | None = None,
        category: str = "compute",
        reads: Sequence[Place] = (),
        writes: Sequence[Place] = (),
        modes: Modes | None = None,
        story: Mapping[str, object] | None = None,
        quiet: bool = False,
    ) -> None:
        super().__init__(lane, run, category)
        self.function: Callable[..., Any] | None = function
        self.arguments = arguments
        self.reads = reads
        self.writes = writes
        self.sources = sources_in(arguments)
        self.name = name or _name_of(function)
        self.category = category
        self.story = story
        self.modes: Modes = modes or current_modes()
        self.context = contextvars.copy_context()
        self.result: Any = None
        self.error: BaseException | None = None
        self.traceback: TracebackType | None = None
        self.seen = quiet
        self.ran_on: int | None = None
        self.after: Sequence[Any] = ()
        self.fence: Any = None
        self.wakes: list[threading.Event] = []

    def call(self) -> Any:
        """Make the call, as the submitting thread would, and return what it returns."""
        given, function = self.arguments, self.function
        if function is None:  # let go of just now: the lane was lost
            return None
        arguments = [value_of(argument) for argument in given]
        modes = current_modes()
        if self.modes is modes or self.modes == modes:
            return self.context.run(function, *arguments)
        with in_modes(self.modes):
            return self.context.run(function, *arguments)

    def let_go(self) -> None:
        """Forget the call: what it was given must not stay alive with its result."""
        self.function = None
        self.arguments = ()
        self.sources = []
        self.reads = self.writes = ()

    def tell(self, device: object) -> str:
        """Say in a line what the task is, and what it reads and writes."""
        try:
            return self._tell(device)
        except Exception as error:  # what a user put into the story can't be printed
            return f"in task {self.name!r} on {device}; its story can't be told: {error!r}"

    def _tell(self, device: object) -> str:
        parts = [f"in task {self.name!r} (number {self.number}) on {device}"]
        parts += [f"{key} {_told(value)}" for key, value in (self.story or {}).items()]
        inputs = [source for source in self.sources if not isinstance(source, Place)]
        for verb, things in (("takes", inputs), ("reads", self.reads), ("writes", self.writes)):
            names = ", ".join(_told(thing) for thing in things)
            parts += [f"{verb} {names}"] if names else []
        return "; ".join(parts)


class Source:
    """What a task may be given in place of a value: it arrives as the value."""

    __slots__ = ()

    @property
    def told(self) -> str:
        """What it is, in a task's story."""
        raise NotImplementedError

    def value_in_task(self) -> Any:
        """Return the value; only called once it is there."""
        raise NotImplementedError


def _told(thing: object) -> str:
    """Say what a thing is, without waiting for its value."""
    return thing.told if isinstance(thing, Source) else str(thing)


def _name_of(function: Callable[..., Any]) -> str:
    """Name a function; its `repr` might wait for a handle, or print a tensor."""
    inner = getattr(function, "func", function)  # of functools.partial
    return str(getattr(inner, "__name__", type(function).__name__))


def value_of(argument: Any) -> Any:
    """Return `argument` with every source in it (also in lists, tuples and dicts) replaced."""
    if isinstance(argument, Source):
        return argument.value_in_task()
    kind = type(argument)
    if kind is list or kind is tuple:
        return kind(map(value_of, argument))
    if kind is dict:
        return {key: value_of(value) for key, value in argument.items()}
    return argument


def sources_in(arguments: Any) -> list[Source]:
    """Return every source in nested lists, tuples and dicts."""
    found: list[Source] = []
    for argument in arguments:
        if isinstance(argument, Source):
            found.append(argument)
        else:
            kind = type(argument)
            if kind is list or kind is tuple:
                found += sources_in(argument)
            elif kind is dict:
                found += sources_in(argument.values())
    return found


def is_device_failure(error: BaseException | None) -> bool:
    """Say whether an error is a device's own: ours, or what torch raises for a broken GPU."""
    accelerator_error = getattr(torch, "AcceleratorError", None)
    return isinstance(error, DeviceLostError) or (
        accelerator_error is not None and isinstance(error, accelerator_error)
    )
