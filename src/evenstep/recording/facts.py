"""What else decides a run: versions, threads, settings, generators, and how data are drawn."""

from __future__ import annotations

import hashlib
import os
import platform
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from evenstep.devices import accelerator
from evenstep.devices.arithmetic import torch_settings


def facts_here(environment: Mapping[str, str]) -> dict[str, str]:
    """Return by name what decides how this process computes."""
    return {
        "the version of torch": torch.__version__,
        "the version of Python": platform.python_version(),
        "the processor": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "the accelerator": accelerator.kind_here() or "none",
        "the number of threads": str(torch.get_num_threads()),
        "the number of cores": str(os.cpu_count()),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        **torch_settings(),
        **{f"the variable {name}": value for name, value in sorted(environment.items())},
    }


def states_of_generators() -> dict[str, str]:
    """Return digests of the states of the generators of random numbers."""
    found = {
        "torch": _digest(torch.default_generator.get_state().numpy().tobytes()),
        "python": _digest(repr(random.getstate()).encode()),
    }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = _digest(numpy.random.get_state()[1].tobytes())
    return found


def loader_facts(loader: Any) -> dict[str, Any]:
    """Return how a data loader draws batches, as far as it says so."""
    sampler = getattr(loader, "sampler", None)
    found = {
        "batch_size": getattr(loader, "batch_size", None),
        "drop_last": getattr(loader, "drop_last", None),
        "sampler": type(sampler).__name__,
        "sampler_epoch": getattr(sampler, "epoch", None),
        "sampler_seed": getattr(sampler, "seed", None),
        "shuffles": getattr(sampler, "shuffle", type(sampler).__name__ == "RandomSampler"),
        "replicas": getattr(sampler, "num_replicas", None),
    }
    try:
        found["batches"] = len(loader)
        found["examples"] = len(loader.dataset)
    except (TypeError, AttributeError):  # a stream
        pass
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, bool | int | float | str | None)
    }


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
