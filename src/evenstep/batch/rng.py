"""Random numbers that depend on seed, epoch, step and shard, and never on the devices.

A process has one default generator for its CPUs, and worker threads that compute shards at the same
time would draw from it in an order that depends on timing. So each shard has its own generator, and
a dispatch mode passes it to every random op of the shard. The shard draws the same numbers as after
`torch.manual_seed(shard_seed(...))`, computed alone.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on `parts` alone (SHA-256 of their text)."""
    text = "/".join(
        f"str:{part}" if isinstance(part, str) else f"int:{operator.index(part)}" for part in parts
    )
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def shard_seed(seed: int, epoch: int, step: int, shard: int) -> int:
    """Return the seed for the random ops of one shard in one training step."""
    return derive_seed("shard", seed, epoch, step, shard)


_CPU = torch.device("cpu")


class ShardRandomness(TorchDispatchMode):
    """A dispatch mode in which every random op draws from the shard's own generator.

    It is active in the thread that enters it. Ops with an overload that takes a generator
    (`aten.rand`) get the shard's; others (`native_dropout`) run inside the mode as the ops that
    they are made of. A generator that the model passes is used.

    While `CALLERS_GENERATORS` are installed, `torch.manual_seed`, `torch.get_rng_state`,
    `torch.random.fork_rng` and their like use the shard's generators too. So a shard may seed its
    numbers anew, and `torch.utils.checkpoint` recomputes with the numbers of the forward pass.

    Attributes:
        was_saved: whether the model has read or set the state of a generator, so that its backward
            pass may recompute activations.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self.was_saved = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether functions that the user has compiled stay compiled inside the mode: yes."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one op, with the shard's generator if the op is random."""
        kwargs = kwargs or {}
        if not _may_draw(func) or _has_generator(args, kwargs) or _is_off(func, args, kwargs):
            return func(*args, **kwargs)
        return self.draw(func, args, kwargs)

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that may be random with the shard's generator."""
        device = _device_of(args, kwargs)
        seedable = _seedable(func)
        if seedable is not None:
            return seedable(*args, **{**kwargs, "generator": self.generator(device)})
        parts = parts_of(func, device.type)
        if parts is not None:
            with self:
                return parts(*args, **kwargs)
        if not _is_random(func):
            return func(*args, **kwargs)
        with _as_default(self.generator(device)):
            return func(*args, **kwargs)

    def backward(self, total: torch.Tensor) -> None:
        """Run the backward pass from `total`; what it draws comes from the shard's generators.

        Torch's own backward kernels don't draw. So it is enough to enter the mode for the ops that
        Python code calls (hooks, an autograd.Function), except where activations may be
        recomputed: there the mode is active all the time, as in the forward pass.
        """
        with self if self.was_saved else _InPythonOnly(self):
            # Tensor.backward would run the whole pass inside one call that a function mode sees.
            _engine_run_backward(
                (total,),
                (torch.ones_like(total, memory_format=torch.preserve_format),),
                False,  # keep_graph
                False,  # create_graph
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the shard's generator for `device`."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        elif device.type == "cpu":
            device = _CPU
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


class _InPythonOnly(TorchFunctionMode):
    """A function mode in which each torch function that Python calls runs inside `randomness`."""

    def __init__(self, randomness: ShardRandomness) -> None:
        self.randomness = randomness

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call one function of torch."""
        with self.randomness:
            return func(*args, **(kwargs or {}))


# ---- the default generators


DEFAULT_GENERATORS = threading.RLock()
"""Held while a default generator temporarily has the state of a shard's generator."""


@contextmanager
def undrawn() -> Iterator[None]:
    """Inside `with`, draws from the CPU's default generator are undone at the end."""
    with DEFAULT_GENERATORS:
        before = torch.default_generator.get_state()
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


@contextmanager
def _as_default(generator: torch.Generator) -> Iterator[None]:
    default = default_generator(generator.device)
    with DEFAULT_GENERATORS:
        before = default.get_state()
        default.set_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(default.get_state())
            default.set_state(before)


def default_generator(device: torch.device) -> torch.Generator:
    """Return torch's default generator for `device`."""
    if device.type == "cuda":
        torch.cuda.init()
        generators = torch.cuda.default_generators
        process_wide = generators.process_wide if isinstance(generators, _OfGPUs) else generators
        return process_wide[device.index or 0]
    return torch.default_generator


_TORCH_RANDOM: Any = torch.random
_TORCH_CUDA: Any = torch.cuda


class _CallersGenerators:
    """Makes torch's functions for random states work on the calling shard's generators.

    These functions look up the default generators under two names in torch's modules; the names are
    replaced while a trainer is open. Outside of shards the process-wide generators are used.

    Attributes:
        times_set: how often the CPU's process-wide generator was seeded, or set to another state.
    """

    def __init__(self) -> None:
        self.times_set = 0
        self._users = 0
        self._lock = threading.RLock()  # the collector's destructors may open a trainer

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside `with`, torch's functions look up the calling thread's generators."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                _TORCH_RANDOM.default_generator = _OfCPU()
                if torch.cuda.is_initialized():
                    _TORCH_CUDA.default_generators = _OfGPUs(torch.cuda.default_generators)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    _TORCH_RANDOM.default_generator = torch.default_generator
                    if isinstance(_TORCH_CUDA.default_generators, _OfGPUs):
                        _TORCH_CUDA.default_generators = _TORCH_CUDA.default_generators.process_wide


CALLERS_GENERATORS = _CallersGenerators()


class _OfCPU:
    """What `torch.manual_seed`, `torch.get_rng_state` and so on take for the default generator."""

    def set_state(self, state: torch.Tensor) -> torch.Generator:
        """Set the state of the caller's generator."""
        generator = _callers_generator(_CPU)
        if generator is torch.default_generator:
            CALLERS_GENERATORS.times_set += not torch.equal(generator.get_state(), state)
        return generator.set_state(state)

    def manual_seed(self, seed: int) -> torch.Generator:
        """Seed the caller's generator."""
        CALLERS_GENERATORS.times_set += 1
        return _callers_generator(_CPU).manual_seed(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(_callers_generator(_CPU), name)


class _OfGPUs(tuple[torch.Generator, ...]):
    """What `torch.cuda.get_rng_state` and so on take for the default generators."""

    @property
    def process_wide(self) -> tuple[torch.Generator, ...]:
        """The process-wide default generators."""
        return tuple(super().__iter__())

    def __getitem__(self, index: Any) -> Any:
        """Return the caller's generator for a GPU."""
        return _callers_generator(torch.device("cuda", index))

    def __iter__(self) -> Iterator[torch.Generator]:
        return (self[index] for index in range(len(self)))


def _callers_generator(device: torch.device) -> torch.Generator:
    randomness = _callers_randomness()
    if randomness is None:
        return default_generator(device)
    randomness.was_saved = True
    return randomness.generator(device)


def _callers_randomness() -> ShardRandomness | None:
    """Return the randomness of the shard that the calling thread computes; autograd's threads too.

    Autograd's threads have the modes of the thread that began the backward pass.
    """
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, ShardRandomness):
            return mode
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, _InPythonOnly):
            return mode.randomness
    return None


# ---- ops


@functools.cache
def _may_draw(func: Any) -> bool:
    """Whether `func` is random, or somebody's own op, of which nothing is known."""
    return _is_random(func) or func.namespace != "aten"


@functools.cache
def parts_of(func: Any, kind: str) -> Callable[..., Any] | None:
    """Return the kernel of `func` that is made of other ops, for a kind of device, or None.

    Inside a mode it calls these ops inside the mode, as an op alone does not.
    """
    keys = [DispatchKey.CompositeImplicitAutograd, DispatchKey.CompositeExplicitAutograd]
    if kind == "cpu" and func.namespace == "aten":
        keys.append(DispatchKey.CPU)
    for key in keys:
        if func.has_kernel_for_dispatch_key(key):
            return functools.partial(func._op_dk, key)
    return None


@functools.cache
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _is_off(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `func` is fused attention without dropout: tagged as random, but it draws nothing."""
    position = _dropout_position(func)
    if position is None:
        return False
    given = args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(given == 0.0)


@functools.cache
def _dropout_position(func: Any) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


@functools.cache
def _seedable(func: Any) -> Any:
    """Return the overload of `func` that takes the same arguments and a generator, or None."""
    wanted = _arguments_but_generator(func)
    packet = func.overloadpacket
    for overload in (func, *(getattr(packet, name) for name in packet.overloads())):
        rest = _arguments_but_generator(overload)
        if rest == wanted and len(rest) < len(overload._schema.arguments):
            return overload
    return None


def _arguments_but_generator(func: Any) -> list[tuple[str, str]]:
    return [
        (argument.name, str(argument.type))
        for argument in func._schema.arguments
        if argument.name != "generator"
    ]


def _has_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values()))


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for value in (kwargs.get("device"), *args):
        if isinstance(value, torch.Tensor):
            return value.device
        if isinstance(value, torch.device):
            return value
    return _CPU
