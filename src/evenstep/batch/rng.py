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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evenstep.errors import ModelError


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on `parts` alone (SHA-256 of their text)."""
    text = "/".join(
        f"str:{part}" if isinstance(part, str) else f"int:{operator.index(part)}" for part in parts
    )
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def shard_seed(seed: int, epoch: int, step: int, shard: int) -> int:
    """Return the seed for the random ops of one shard in one training step."""
    return derive_seed("shard", seed, epoch, step, shard)


class ShardRandomness(TorchDispatchMode):
    """A dispatch mode in which every random op draws from the shard's own generator.

    It is active in the thread that enters it. Ops with an overload that takes a generator
    (`aten.rand`) get the shard's. For others (CUDA's fused dropout) the default generator is given
    the shard's state while they run, one op at a time. A generator that the model passes is used.

    An op raises ModelError if it recomputes activations in the backward pass:
    `torch.utils.checkpoint` replays the default generator, which the forward pass did not use.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self.in_backward = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one op, with the shard's generator if the op is random."""
        kwargs = kwargs or {}
        if not _is_random(func) or _has_generator(args, kwargs) or _is_off(func, args, kwargs):
            return func(*args, **kwargs)
        if self.in_backward and torch.is_grad_enabled():
            raise ModelError(
                f"{func} draws random numbers while activations are recomputed in the backward "
                f"pass: leave random layers (dropout) outside torch.utils.checkpoint, or set "
                f"their rate to 0"
            )
        generator = self._generator(_device_of(args, kwargs))
        seedable = _seedable(func)
        if seedable is not None:
            return seedable(*args, **{**kwargs, "generator": generator})
        with _as_default(generator):
            return func(*args, **kwargs)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


DEFAULT_GENERATORS = threading.Lock()
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
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


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
    return torch.device("cpu")
