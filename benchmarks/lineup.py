"""Who runs in `training_speed.py`: `evenstep bench peers`, and what else we want to know."""

from __future__ import annotations

import dataclasses
from typing import Any

from allocators import ALLOCATORS
from evenstep.bench.lineup import Contender, accelerate, ddp, devices, fabric, plain

STEPS = {"lenet": (5, 176), "resnet18": (2, 5)}  # warm-up, timed: 3 s and more at the fastest
CHANNELS_LAST = "channels_last"


def lineup() -> list[Contender]:
    """Return all contenders, LeNet's first."""
    return _lenet() + _resnet18()


def chosen(only: str | None) -> list[Contender]:
    """Return the contenders that `only` names, between commas.

    A whole key names that one alone, the beginning of keys all that begin so.
    """
    known = lineup()
    names = only.split(",") if only else [""]
    whole = {contender.key for contender in known}.intersection(names)
    begins = tuple(set(names) - whole)
    found = [one for one in known if one.key in whole or one.key.startswith(begins)]
    if not found:
        keys = ", ".join(contender.key for contender in known)
        raise SystemExit(f"--only {only} names no contender: write the beginning of some of {keys}")
    return found


def job(network: str, examples: int) -> dict[str, Any]:
    """Return what all contenders of a network share."""
    warmup_steps, steps = STEPS[network]
    return {
        "network": network,
        "examples": examples,
        "warmup_steps": warmup_steps,
        "steps": steps,
    }


def _lenet() -> list[Contender]:
    both = job("lenet", 256)
    return [
        plain(both, 1),
        plain(both, 1, CHANNELS_LAST),
        plain(both, 2),
        plain(both, 2, CHANNELS_LAST),
        *_peers(both),
        devices(both, 1),
        devices(both, 2),
        devices(both, 2, max_in_flight=2),
        devices(both, 1, hybridize=True),
        devices(both, 2, hybridize=True),
        devices(both, 2, shards=2),
        devices(both, 1, memory_format="contiguous"),
        devices(both, 2, memory_format="contiguous"),
        _keeping(plain(both, 1, CHANNELS_LAST)),
        _keeping(ddp(both, 2, CHANNELS_LAST)),
    ]


def _resnet18() -> list[Contender]:
    one, two = job("resnet18", 64), job("resnet18", 128)
    return [
        plain(one, 1),
        *_peers(two),
        devices(one, 1),
        devices(two, 1),
        devices(two, 2),
        devices(two, 2, max_in_flight=2),
        devices(two, 2, hybridize=True),
        devices(two, 2, batch_norm="sync"),
        devices(one, 1, shards=2),
        devices(two, 2, shards=2),
        devices(one, 1, precision="bf16"),
        devices(two, 2, precision="bf16"),
        _keeping(ddp(two, 2, CHANNELS_LAST)),
    ]


def _peers(shared: dict[str, Any]) -> list[Contender]:
    return [
        ddp(shared, 2),
        ddp(shared, 2, CHANNELS_LAST),
        accelerate(shared, 2),
        fabric(shared, 2),
    ]


def _keeping(contender: Contender) -> Contender:
    """Return the contender with a malloc that keeps freed memory (`allocators.py`)."""
    return dataclasses.replace(
        contender,
        key=f"{contender.key}.keeps",
        label=f"{contender.label}, malloc keeps",
        environment=ALLOCATORS["keeps"],
    )
