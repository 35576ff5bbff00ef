"""Random numbers as a function of (seed, place in the training, shard): never of the layout.

A CPU has one default generator a process, and lanes are threads: two shards computed side by side
would share its stream in whatever order they came. So each shard has a generator of its own, seeded
from what the shard *is*, and a dispatch mode hands it to every random op of the shard. The draws
are those of `torch.manual_seed(shard_seed)` followed by the shard alone.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evenstep.errors import ModelError


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that is a function of `parts` alone (SHA-256 of their text)."""
    text = "/".join(
        f"str:{part}" if isinstance(part, str) else f"int:{operator.index(part)}" for part in parts
    )
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def shard_seed(seed: int, epoch: int, step: int, shard: int) -> int:
    """Return the seed of the random ops of one shard of one training step."""
    return derive_seed("shard", seed, epoch, step, shard)


class ShardRandomness(TorchDispatchMode):
    """While active in a thread, every random op there draws from the shard's own generator.

    Ops that take a generator, or have a twin that does (`aten.rand`), get it. The others (CUDA's
    fused dropout) run with the default generator lent the shard's state, one at a time. A generator
    that the model passes itself is left alone.

    Raises (from inside the op) ModelError when activations are recomputed in the backward pass:
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
        """Run one op, with the shard's generator where it is a random one."""
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
        with _lent_to_default(generator):
            return func(*args, **kwargs)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]


def default_states(devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Return the states of the default generators behind `devices`, while none is lent."""
    with DEFAULT_GENERATORS:
        return [default_generator(device).get_state() for device in devices]


def have_moved(devices: Sequence[torch.device], states: Sequence[torch.Tensor]) -> bool:
    """Say whether any of the default generators is no longer in its state of `states`."""
    return any(
        not torch.equal(now, then)
        for now, then in zip(default_states(devices), states, strict=True)
    )


def restore_default_states(devices: Sequence[torch.device], states: Sequence[torch.Tensor]) -> bool:
    """Put the default generators back to `states`; say whether any of them had moved."""
    moved = have_moved(devices, states)
    if moved:
        for device, state in zip(devices, states, strict=True):
            default_generator(device).set_state(state)
    return moved


DEFAULT_GENERATORS = threading.Lock()
"""Held while a default generator is in a state that is not its own, to be put back soon."""


@contextmanager
def undrawn() -> Iterator[None]:
    """Put the CPU's default generator back afterwards; no shard borrows it meanwhile."""
    with DEFAULT_GENERATORS:
        before = torch.default_generator.get_state()
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


@contextmanager
def _lent_to_default(generator: torch.Generator) -> Iterator[None]:
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
    """Say whether `func` is fused attention without dropout: it counts as random, but isn't."""
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
    """Return the overload of `func` that takes a generator besides the same arguments, or None."""
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
