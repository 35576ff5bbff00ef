"""Random ops that draw from the generator of the shard that calls them, and never of the device.

A process has one default generator for its CPUs, and worker threads that compute shards at the same
time would draw from it in an order that depends on timing. So each shard has its own generator, and
every random op of the shard gets it passed. The shard draws the same numbers as after
`torch.manual_seed(shard_seed(...))` (`batch/seeds.py`), computed alone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from evenstep.devices import accelerator, process_wide
from evenstep.errors import ModelError
from evenstep.private_torch import dispatch
from evenstep.private_torch.graph import is_in_backward

_CPU = torch.device("cpu")


class ShardRandomness:
    """Inside `with`, the calling thread's random ops draw from a shard's own generators.

    Autograd computes a shard's backward pass in the thread that calls it, also on accelerators
    (`devices.accelerator.open_lane`). A generator that the model passes is used.

    Inside `callers_generators`, `torch.manual_seed`, `torch.get_rng_state`,
    `torch.random.fork_rng` and their like use the shard's generators too. So a shard may seed its
    numbers anew, and `torch.utils.checkpoint` recomputes with the numbers of the forward pass.
    """

    def __init__(self, seed: Callable[[], int]) -> None:
        """Create generators when they are needed; no `seed` is read for a shard that draws none."""
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._last: torch.Generator | None = None  # of an accelerator
        self._outer: ShardRandomness | None = None

    def __enter__(self) -> None:
        if not _routes:
            _route_random_ops()
        self._outer = getattr(_HERE, "randomness", None)
        _HERE.randomness = self
        _in_shards.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        _HERE.randomness = self._outer
        if self._outer is None:
            _in_shards.discard(threading.get_ident())

    @property
    def has_drawn(self) -> bool:
        """Whether a random op has drawn from one of the generators."""
        return bool(self._generators)

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the shard's generator for `device`; all accelerators draw from one sequence."""
        if device.type == "cpu":
            device = _CPU
        elif device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed())
        found = self._generators[device]
        if device is not _CPU and self._last is not found:  # the next stage of the network
            if self._last is not None:
                found.set_state(self._last.get_state())
            self._last = found
        return found


_HERE = threading.local()
"""Of a thread: `randomness`, of the shard that it computes, and `lent`, the device whose default
generator has the state of the shard's now."""

_in_shards: set[int] = set()
"""The threads that compute shards."""


def _callers_randomness(device: torch.device) -> ShardRandomness | None:
    """Return the randomness of the shard that the calling thread computes; None outside of shards.

    Raises:
        ModelError: autograd computes part of a shard's backward pass in a thread of its own, where
            the shard is not known. (On an accelerator, and while no shard is computed, it is a
            backward pass of the user's own.)
    """
    found: ShardRandomness | None = getattr(_HERE, "randomness", None)
    if found is None and _in_shards and device.type == "cpu" and is_autograds_thread():
        raise ModelError(
            "random numbers are drawn in a backward pass inside more than 60 others, which "
            "autograd runs in a thread of its own: use torch.utils.checkpoint with "
            "use_reentrant=False"
        )
    return found


def is_autograds_thread() -> bool:
    """Whether the calling thread was started by autograd, for a part of a backward pass."""
    here = threading.get_ident()
    return is_in_backward() and here not in {thread.ident for thread in threading.enumerate()}


def is_in_shard() -> bool:
    """Whether the calling thread computes a shard."""
    return getattr(_HERE, "randomness", None) is not None


def generator_here(device: torch.device) -> torch.Generator:
    """Return what the calling thread draws from on a device: its shard's generator, or torch's."""
    shard: ShardRandomness | None = getattr(_HERE, "randomness", None)
    return default_generator(device) if shard is None else shard.generator(device)


# ---- the default generators


DEFAULT_GENERATORS = threading.RLock()
"""Held while a default generator temporarily has the state of a shard's generator."""


@contextmanager
def _as_default(generator: torch.Generator) -> Iterator[None]:
    default = default_generator(generator.device)
    with DEFAULT_GENERATORS:
        before = default.get_state()
        default.set_state(generator.get_state())
        _HERE.lent = generator.device
        try:
            yield
        finally:
            _HERE.lent = None
            generator.set_state(default.get_state())
            default.set_state(before)


def default_generator(device: torch.device) -> torch.Generator:
    """Return torch's default generator for `device`."""
    is_cpu = device.type == "cpu"
    return torch.default_generator if is_cpu else accelerator.default_generator(device)


_TORCH_RANDOM: Any = torch.random


@process_wide
@contextmanager
def callers_generators() -> Iterator[None]:
    """Inside `with`, torch's functions for random states use the calling shard's generators.

    These functions look up the default generators under two names in torch's modules; the names are
    replaced while a trainer is open. Outside of shards the process-wide generators are used.
    """
    _TORCH_RANDOM.default_generator = _OfCPU()
    try:
        with accelerator.routed_generators(_callers_generator):
            yield
    finally:
        _TORCH_RANDOM.default_generator = torch.default_generator


class _OfCPU:
    """What `torch.manual_seed`, `torch.get_rng_state` and so on take for the default generator."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_callers_generator(_CPU), name)


def _callers_generator(device: torch.device) -> torch.Generator:
    randomness = _callers_randomness(device)
    return default_generator(device) if randomness is None else randomness.generator(device)


# ---- ops

_COMPOSITES = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
_routes: list[torch.library.Library] = []
_ROUTING = threading.Lock()


class _Watch(NamedTuple):
    """What runs the random ops of a thread that are given a generator."""

    thread: int
    run: Callable[[torch.Generator, Callable[[], Any]], Any]

    @property
    def is_for_here(self) -> bool:
        return self.thread == threading.get_ident() or is_autograds_thread()


_watches: list[_Watch] = []


@contextmanager
def watched_generators(run: Callable[[torch.Generator, Callable[[], Any]], Any]) -> Iterator[None]:
    """Inside `with`, random ops of the calling thread that are given a generator are run by `run`.

    So are those of autograd's threads. `run` gets the generator and a function that runs the op,
    whose result it returns.
    """
    if not _routes:
        _route_random_ops()
    watch = _Watch(threading.get_ident(), run)
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)


def _route_random_ops() -> None:
    """Let every op that draws look up the generator of its calling thread; once in a process.

    The kernels lie below autograd and above those of the devices ("BackendSelect", which every call
    of an op passes), so that ops without random numbers cost what they did. Outside of shards they
    hand the call on as it is.
    """
    with _ROUTING:
        if not _routes:
            library = torch.library.Library("aten", "IMPL", "BackendSelect")
            behind = dispatch.keys_after(dispatch.DispatchKey.BackendSelect)
            for op in _ops_that_draw():
                library.impl(op, functools.partial(_draw, op, behind), with_keyset=True)
            _routes.append(library)


def _ops_that_draw() -> Iterator[Any]:
    """Yield the random ops of torch that are not made of other ops."""
    for name in dispatch.all_ops():
        if not name.startswith("aten::"):
            continue
        if any(dispatch.has_kernel(name, key) for key in (*_COMPOSITES, "BackendSelect")):
            continue
        if torch.Tag.nondeterministic_seeded in dispatch.tags_of(name):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            yield getattr(getattr(torch.ops.aten, packet), overload or "default")


def _draw(op: Any, behind: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a random op behind this kernel; inside a shard, with the shard's generator."""
    run = functools.partial(op.redispatch, keys & behind)
    given = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Generator)]
    if given:
        watch = next((watch for watch in _watches if watch.is_for_here), None)
        run = functools.partial(run, *args, **kwargs)
        return run() if watch is None else watch.run(given[0], run)
    device = _device_of(args, kwargs)
    if getattr(_HERE, "lent", None) == device:  # inside an op that draws from that generator
        return run(*args, **kwargs)
    randomness = _callers_randomness(device)
    if randomness is None:
        if device.type == "cpu":
            return run(*args, **kwargs)
        with DEFAULT_GENERATORS:  # a shard's state may be in the default generator's place
            return run(*args, **kwargs)
    if "generator" in _argument_names(op):
        return run(*args, **{**kwargs, "generator": randomness.generator(device)})
    if device.type == "cpu" or _is_off(op, args, kwargs):  # a CPU's kernel is made of other ops
        return run(*args, **kwargs)
    with _as_default(randomness.generator(device)):
        return run(*args, **kwargs)


@functools.cache
def _argument_names(op: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in dispatch.arguments_of(op))


def _is_off(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `op` is fused attention without dropout: tagged as random, but it draws nothing."""
    names = _argument_names(op)
    if "dropout_p" not in names:
        return False
    position = names.index("dropout_p")
    given = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(given == 0.0)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for value in (kwargs.get("out"), *args):
        if isinstance(value, torch.Tensor):
            return value.device
    return _CPU
