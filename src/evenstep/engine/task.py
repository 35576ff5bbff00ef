"""A task: a call that the engine makes in a lane, with the modes of the thread that submitted it.

Torch's modes (grad mode, autocast) are thread-local. A task runs in another thread than the one
that submitted it, and must compute what the call would have computed there.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import torch

from evenstep.devices import Device, accelerator
from evenstep.devices.accelerator import autocast_kinds
from evenstep.engine.graph import Place
from evenstep.engine.schedule import Job
from evenstep.errors import DeviceLostError, text_of


class Modes(NamedTuple):
    """The thread-local modes of torch that change what an op does.

    Attributes:
        grad: whether ops are recorded for the backward pass.
        inference: whether inference mode is on.
        autocast: the dtypes that autocast uses, by the type of device, where it is on.
    """

    grad: bool
    inference: bool
    autocast: Mapping[str, torch.dtype]


def current_modes() -> Modes:
    """Return the modes of the calling thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casting = [kind for kind in autocast_kinds() if torch.is_autocast_enabled(kind)]
    if grad and not (inference or casting):
        return PLAIN
    return Modes(grad, inference, {kind: torch.get_autocast_dtype(kind) for kind in casting})


@contextlib.contextmanager
def in_modes(modes: Modes) -> Iterator[None]:
    """Set the modes of the calling thread, and restore its own at the end.

    Autocast's cache of cast weights is shared by the process, and leaving autocast in one thread
    clears it for all threads. So the cache stays off.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(modes.inference))
        stack.enter_context(torch.set_grad_enabled(modes.grad))
        for kind in autocast_kinds():
            if (dtype := modes.autocast.get(kind)) is not None:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=False))
            elif torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


IS_ASIDE: contextvars.ContextVar[bool] = contextvars.ContextVar("is aside", default=False)
"""Whether a thread computes what belongs to no step: a check of the user's code, a measurement."""


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Inside `with`, what is computed belongs to no step."""
    outside = IS_ASIDE.set(True)
    try:
        yield
    finally:
        IS_ASIDE.reset(outside)


PLAIN = Modes(grad=True, inference=False, autocast=MappingProxyType({}))
"""The modes of a new thread."""


class Task(Job):
    """A call and its outcome.

    Args:
        function: the function to call.
        arguments: its arguments; a `Source` among them arrives as its value.
        lane: the lane to run on; None: any computing lane.
        name: the name in errors and in the trace; None: the name of the function.
        category: what its time counts as in the trace: "compute", "sum", "update", "copy" or a
            category of your own.
        reads: places that it reads besides its arguments.
        writes: places that it writes besides its arguments.
        modes: the modes to call it in; None: those of the submitting thread.
        story: further facts for errors and the trace, such as {"step": 3}.
        quiet: the engine does not raise its error at the end: the submitter asks for it.

    Attributes:
        sources: the handles and Vars among its arguments.
        result: the return value of the call.
        error: the exception that it raised, or the reason why it did not run.
        traceback: the traceback of `error`.
        seen: whether `error` was raised to a caller (or is left to the submitter, see `quiet`).
        ran_on: the lane that it ran on.
        after: on accelerators: events recorded behind the submitting thread's own kernels.
        fence: on an accelerator: the event recorded behind the task's kernels.
        wakes: locks to release when the task ends.
    """

    __slots__ = (
        "after", "arguments", "category", "context", "error", "fence", "function", "modes", "name",
        "ran_on", "result", "seen", "sources", "story", "traceback", "wakes",
    )  # fmt: skip

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...] = (),
        *,
        lane: int | None = None,
        name: str | None = None,
        category: str = "compute",
        reads: Sequence[Place] = (),
        writes: Sequence[Place] = (),
        modes: Modes | None = None,
        story: Mapping[str, object] | None = None,
        quiet: bool = False,
    ) -> None:
        super().__init__(lane)
        self.function: Callable[..., Any] | None = function
        self.arguments = arguments
        self.reads = reads
        self.writes = writes
        self.sources = sources_in(arguments)
        self.name = name or name_of(function)
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
        self.wakes: list[threading.Lock] = []

    def call(self) -> Any:
        """Make the call in the modes and context of the submitting thread; return its result."""
        given, function = self.arguments, self.function
        if function is None:  # released just now, because the lane was lost
            return None
        arguments = [value_of(argument) for argument in given]
        modes = current_modes()
        if self.modes is modes or self.modes == modes:
            return self.context.run(function, *arguments)
        with in_modes(self.modes):
            return self.context.run(function, *arguments)

    def release(self) -> object:
        """Drop the arguments of an ended task, so that its result does not keep them alive.

        Returns:
            What was dropped; the caller frees it where destructors may run.
        """
        dropped = self.function, self.arguments, self.sources, self.reads, self.writes
        self.function = None
        self.arguments = ()
        self.sources = []
        self.reads = self.writes = ()
        return dropped

    def describe(self, device: object) -> str:
        """Return one line about the task: its name, its story, what it reads and writes."""
        try:
            return "; ".join(self._facts(device))
        except Exception as error:  # a value in the user's story can't be printed
            why = text_of(error, repr)
            return f"in task {self.name!r} on {device}; its story can't be printed: {why}"

    def _facts(self, device: object) -> Iterator[str]:
        yield f"in task {self.name!r} (number {self.number}) on {device}"
        for key, value in (self.story or {}).items():
            yield f"{key} {_description(value)}"
        inputs = [source for source in self.sources if not isinstance(source, Place)]
        for verb, things in (("takes", inputs), ("reads", self.reads), ("writes", self.writes)):
            if things:
                yield f"{verb} {', '.join(map(_description, things))}"


class Source:
    """An argument of a task that stands for a value which may not exist yet."""

    __slots__ = ()

    @property
    def description(self) -> str:
        """A name for error messages; available before the value is."""
        raise NotImplementedError

    def value_in_task(self) -> Any:
        """Return the value; called only once it exists."""
        raise NotImplementedError


def _description(thing: object) -> str:
    return thing.description if isinstance(thing, Source) else str(thing)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function; its `repr` might wait for a handle, or print a tensor."""
    inner = getattr(function, "func", function)  # of functools.partial
    return str(getattr(inner, "__name__", type(function).__name__))


def value_of(argument: Any) -> Any:
    """Return `argument` with every source in it replaced, in nested lists, tuples and dicts too."""
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


def failure_behind(error: BaseException, device: Device) -> BaseException:
    """Return the failure of a device behind an error; the error itself if it has not failed.

    Libraries that torch calls (cuBLAS, cuDNN) have errors of their own for a failed device.
    """
    if isinstance(error, RuntimeError) and not is_device_failure(error):
        for part in device.parts:
            failure = accelerator.failure_of(part.torch_device) if part.is_accelerator else None
            if failure is not None and accelerator.is_failure(failure):
                return failure
    return error


def is_device_failure(error: BaseException | None) -> bool:
    """Return whether an error means that a device failed: ours, or torch's for an accelerator."""
    return isinstance(error, DeviceLostError) or (
        error is not None and accelerator.is_failure(error)
    )
