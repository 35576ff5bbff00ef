"""The accelerator of this machine, of whatever kind torch can use: the one place that knows it.

torch has one kind of accelerator at a time (`torch.accelerator`): GPUs by CUDA or ROCm, Intel's
XPUs, or what an extension registers. Besides tensors, evenstep needs of it streams, events, and the
names that the modules of these kinds share (`torch.cuda`, `torch.xpu`, ...). A kind that lacks one
of these is refused by its name. CPU devices need nothing of this.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from evenstep.errors import DeviceError

_ASSERTION, _NO_MEMORY = "device-side assert", "out of memory"
_NEEDED = ("device_count", "default_generators")
"""The names in a kind's module without which shards could not be computed there."""

_WORKSPACE, _DETERMINISTIC = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""What makes matrix products of cuBLAS deterministic. CUDA reads it when it starts."""


# ---- which there are


def kind_here() -> str | None:
    """Return the type of this machine's accelerators, such as "cuda"; None without one."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def autocast_kinds() -> tuple[str, ...]:
    """Return the types of devices whose autocast may be on in a thread."""
    try:
        found = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6 without an accelerator
        found = None
    return ("cpu",) if found is None else ("cpu", found.type)


def count_here() -> int:
    """Return the number of accelerators that evenstep can use; 0 of a kind that lacks something."""
    kind = kind_here()
    return 0 if kind is None or _lacking(kind) else int(_module(kind).device_count())


def _lacking(kind: str) -> list[str]:
    module = _module(kind)
    return [f"torch.{kind}.{name}" for name in _NEEDED if not hasattr(module, name)]


def refuse_incomplete(kind: str, devices: Sequence[torch.device]) -> None:
    """Refuse a kind of accelerator that lacks what evenstep needs.

    Afterwards a device of the list has been used: torch starts on it, not on the first one of the
    machine, for pinned memory.

    Args:
        kind: the kind.
        devices: those of this kind that were asked for.

    Raises:
        DeviceError: names what it lacks.
    """
    lacking = _lacking(kind)
    try:
        for device in devices[:1]:
            torch.Event(device)
            torch.Stream(device)
    except (RuntimeError, TypeError) as error:
        lacking.append(f"streams and events ({error})")
    if lacking:
        raise DeviceError(
            f"evenstep can't compute on {kind} devices, for which torch lacks "
            f"{' and '.join(lacking)}: use CPU devices (cpu:0, cpu:1, ...)"
        )


def ask_for_deterministic_products(kind: str) -> None:
    """Set the variable by which cuBLAS computes with the same bits each time, if it is not set.

    Raises:
        DeviceError: CUDA has started without it.
    """
    if kind != "cuda" or _WORKSPACE in os.environ:
        return
    if torch.cuda.is_initialized():
        raise DeviceError(
            f"CUDA has started without {_WORKSPACE}, so its matrix products may have other bits "
            f"each time: write os.environ[{_WORKSPACE!r}] = {_DETERMINISTIC!r} above `import "
            f"torch`, or find the devices before anything is on a GPU"
        )
    os.environ[_WORKSPACE] = _DETERMINISTIC


def adds_losses_in_any_order(device: torch.device) -> bool:
    """Return whether `nll_loss` adds up the losses of pixels there by atomic operations."""
    return device.type == "cuda"


def model_name(device: torch.device) -> str:
    """Return the hardware model of an accelerator, or its type if torch doesn't know the model."""
    named = getattr(_module(device.type), "get_device_name", None)
    return device.type if named is None else str(named(device.index))


def memory_nbytes(device: torch.device) -> tuple[int, int]:
    """Return how many bytes of an accelerator's memory are free, and its size."""
    of_all_kinds = getattr(torch.accelerator, "get_memory_info", None)  # not in torch 2.6 to 2.9
    free, size = (of_all_kinds or _module(device.type).mem_get_info)(device.index)
    return int(free), int(size)


def is_failure(error: BaseException) -> bool:
    """Return whether torch raised an error because an accelerator failed.

    An assertion in a kernel (a label that is no class, an index outside of a tensor) is the
    program's: it would fail on every other device, too. So is a lack of memory.
    """
    text = str(error)
    return _is_of_accelerator(error) and _ASSERTION not in text and _NO_MEMORY not in text


def _is_of_accelerator(error: BaseException) -> bool:
    """Return whether the error is of a call to an accelerator's runtime."""
    kind = getattr(torch, "AcceleratorError", None)
    if kind is not None:
        return isinstance(error, kind)
    # Torch 2.6 and 2.7 have no class for it, and spell errors of cuBLAS alike.
    text = str(error)
    return type(error) is RuntimeError and text.startswith("CUDA error: ") and "CUBLAS" not in text


def failure_of(device: torch.device) -> RuntimeError | None:
    """Return the error with which an accelerator refuses every call; None if it has not failed."""
    try:
        fence_here(device).query()
    except RuntimeError as error:
        return error
    return None


def has_failed(device: torch.device) -> bool:
    """Return whether an accelerator refuses every call, since something on it has failed."""
    return failure_of(device) is not None


@contextmanager
def ignoring_failed(*devices: torch.device) -> Iterator[None]:
    """Inside `with`, ignore errors if one of `devices` has failed: what uses it will fail, too."""
    try:
        yield
    except RuntimeError:
        if not any(one.type != "cpu" and has_failed(one) for one in devices):
            raise


# ---- streams and events


def streams_on(devices: Sequence[torch.device]) -> list[torch.Stream]:
    """Return a stream for each of these accelerators."""
    return [*map(torch.Stream, devices)]


def open_lane(streams: Sequence[torch.Stream]) -> None:
    """Let the calling thread compute on accelerators, on each in a stream of its own.

    The device of the last one becomes its current device.

    Autograd computes backward passes in the calling thread, as on CPUs, instead of in one thread
    for each device. Each thread numbers the nodes that it makes; a backward pass through another
    one (`create_graph=True`) orders them by number. With nodes of two threads, the order of its
    sums would depend on what else each of them has computed.
    """
    for stream in streams:
        torch.accelerator.set_device_index(stream.device_index)
        torch.accelerator.set_stream(stream)
    torch.autograd.set_multithreading_enabled(False)


def fence_here(device: torch.device) -> torch.Event:
    """Record an event behind the kernels that the calling thread has launched on a device."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device.index))
    return event


def wait_here(fence: torch.Event, device: torch.device) -> None:
    """Make the calling thread's stream on a device wait for an event, also of another device."""
    torch.accelerator.current_stream(device.index).wait_event(fence)


def moment_here(device: torch.device) -> torch.Event:
    """Record such an event that has a time."""
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device.index))
    return event


def seconds_between(early: torch.Event, late: torch.Event) -> float:
    """Return the seconds between two moments on one device, which have passed."""
    return float(early.elapsed_time(late)) / 1e3


@contextmanager
def queued_on(stream: torch.Stream) -> Iterator[None]:
    """Inside `with`, the calling thread's kernels on the stream's device are queued there.

    They run behind those that the thread has launched on the device before.
    """
    device = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device_index)
    stream.wait_stream(before)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


def allocate_on(device: torch.device) -> None:
    """Let the calling thread's new tensors lie on an accelerator where no number is named."""
    torch.accelerator.set_device_index(device.index)


def keep(tensor: torch.Tensor) -> None:
    """Mark a tensor's memory as used by the calling thread's stream, so that it is not reused."""
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.accelerator.current_stream(tensor.device.index))


def synchronize(device: torch.device) -> None:
    """Wait for all kernels on a device; on a CPU, none is left."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device.index)


# ---- memory of the host


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a CPU's tensor in pinned memory; the tensor itself where none can be had.

    When an accelerator has failed, torch raises its error for whoever next asks for pinned memory,
    once for each block that the accelerator had used. Copies without pinned memory are right, too.
    """
    try:
        return tensor.pin_memory()
    except RuntimeError as error:
        if not _is_of_accelerator(error):
            raise
        return tensor


def copy_to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of an accelerator's tensor in pinned memory, which has not ended on return.

    Where no pinned memory can be had (see `pinned`), it is in other memory, and has ended.
    """
    try:
        return tensor.to("cpu", non_blocking=True)
    except RuntimeError as error:
        if not _is_of_accelerator(error):
            raise
        return tensor.to("cpu")


# ---- random numbers


def default_generator(device: torch.device) -> torch.Generator:
    """Return torch's process-wide default generator for an accelerator."""
    module = _module(device.type)
    module.init()
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    found: torch.Generator = _process_wide(module.default_generators)[index]
    return found


def current() -> list[torch.device]:
    """Return the calling thread's current accelerator; none before one was used."""
    kind = None if _initialized() is None else kind_here()
    return [] if kind is None else [torch.device(kind, torch.accelerator.current_device_index())]


def generator_states() -> list[torch.Tensor]:
    """Return the states of the default generators of all accelerators that were used."""
    module = _initialized()
    return (
        []
        if module is None
        else [one.get_state() for one in _process_wide(module.default_generators)]
    )


def set_generator_states(states: list[torch.Tensor]) -> None:
    """Set the states that `generator_states` returned; skip those of devices that aren't there."""
    kind = kind_here()
    for number, state in enumerate(states[: count_here()]):
        default_generator(torch.device(str(kind), number)).set_state(state)


@contextmanager
def routed_generators(find: Any) -> Iterator[None]:
    """Inside `with`, torch's functions for random states use the generators that `find` returns.

    They look up the default generators by their name in the module of the kind.

    Args:
        find: returns the generator for a device, given the `torch.device`.
    """
    module = _initialized()
    if module is None:
        yield
        return
    before = module.default_generators
    module.default_generators = _Routed(before, module.__name__.rpartition(".")[2], find)
    try:
        yield
    finally:
        module.default_generators = before


class _Routed(tuple[torch.Generator, ...]):
    """What `torch.cuda.get_rng_state` and so on take for the default generators."""

    find: Any
    kind: str

    def __new__(cls, generators: tuple[torch.Generator, ...], kind: str, find: Any) -> _Routed:
        made = super().__new__(cls, generators)
        made.kind, made.find = kind, find
        return made

    def __getitem__(self, index: Any) -> Any:
        """Return the caller's generator for a device."""
        return self.find(torch.device(self.kind, index))

    def __iter__(self) -> Iterator[torch.Generator]:
        return (self[index] for index in range(len(self)))


def _process_wide(generators: tuple[torch.Generator, ...]) -> tuple[torch.Generator, ...]:
    return tuple(tuple.__iter__(generators))


def _initialized() -> Any:
    """Return the module of the accelerator here if it was used; None if it wasn't."""
    kind = kind_here()
    module = None if kind is None else _module(kind)
    return module if module is not None and module.is_initialized() else None


def _module(kind: str) -> Any:
    return torch.get_device_module(kind)
