"""The arrays of MXNet's first interface: `nd.ones`, `nd.dot`, `nd.random.normal`, ..."""

from __future__ import annotations

import importlib
from typing import Any

from evenstep.mxnet.core.array import NDArray
from evenstep.mxnet.core.make import Maker, Random
from evenstep.mxnet.core.operand import operator
from evenstep.mxnet.core.runtime import waitall
from evenstep.mxnet.core.store import load, save
from evenstep.mxnet.ops import tables

__all__ = ["NDArray", "load", "random", "save", "waitall"]

random = Random(NDArray)
_MADE = Maker(NDArray).functions()


def __getattr__(name: str) -> Any:
    """Return a function that makes arrays, or one of the table `nd`."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name in ("np", "npx"):  # of F in hybrid_forward
        return importlib.import_module(f"evenstep.mxnet.{name}")
    return _MADE[name] if name in _MADE else operator("nd", name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_MADE, *tables.ND])
