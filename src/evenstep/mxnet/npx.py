"""What MXNet adds to numpy's names: layers' functions, contexts, saving, `waitall`."""

from __future__ import annotations

from typing import Any

from evenstep.mxnet.core.context import Context, cpu, current_context, gpu, num_gpus
from evenstep.mxnet.core.operand import operator
from evenstep.mxnet.core.runtime import runtime, waitall
from evenstep.mxnet.core.store import load, save
from evenstep.mxnet.ops import tables
from evenstep.mxnet.random import seed

__all__ = [
    "Context",
    "cpu",
    "current_context",
    "gpu",
    "load",
    "num_gpus",
    "reset_np",
    "save",
    "seed",
    "set_np",
    "waitall",
]


def set_np(shape: bool = True, array: bool = True, dtype: bool = False) -> None:
    """Let loaders give arrays of `np`. Both kinds of arrays can always be used side by side."""
    runtime().uses_np = array


def reset_np() -> None:
    """Let loaders give arrays of `nd` again."""
    runtime().uses_np = False


def __getattr__(name: str) -> Any:
    """Return a function of the table `npx`."""
    if name.startswith("__"):
        raise AttributeError(name)
    return operator("npx", name)


def __dir__() -> list[str]:
    return sorted([*__all__, *tables.NPX])
