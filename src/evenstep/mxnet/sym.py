"""Symbols: `sym.var("data")`, and the functions of `nd` on symbols."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from evenstep.mxnet.core.operand import operator
from evenstep.mxnet.core.types import Spec, torch_dtype
from evenstep.mxnet.ops import tables
from evenstep.mxnet.symbols.symbol import Symbol

__all__ = ["Symbol", "Variable", "var"]


def var(name: str, shape: Sequence[int] | None = None, dtype: Any = None) -> Symbol:
    """Return a variable: the symbol of an input. With a shape, the shapes of results are known."""
    spec = None if shape is None else Spec(tuple(shape), torch_dtype(dtype))
    return Symbol(name, spec=spec)


Variable = var


def __getattr__(name: str) -> Any:
    """Return a function of the table `nd`, which records its calls with symbols."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name in ("np", "npx"):  # of F in hybrid_forward
        return importlib.import_module(f"evenstep.mxnet.{name}")
    return operator("nd", name)


def __dir__() -> list[str]:
    return sorted([*__all__, *tables.ND])
