"""The arrays of MXNet's second interface, with the names of numpy: `np.ones`, `np.dot`, ..."""

from __future__ import annotations

from typing import Any

import numpy

from evenstep.mxnet.core.array import ndarray
from evenstep.mxnet.core.make import Maker, Random
from evenstep.mxnet.core.operand import operator
from evenstep.mxnet.ops import tables

__all__ = [
    "bool_",
    "e",
    "float16",
    "float32",
    "float64",
    "inf",
    "int8",
    "int32",
    "int64",
    "nan",
    "ndarray",
    "newaxis",
    "pi",
    "random",
    "uint8",
]

random = Random(ndarray)
pi, e, inf, nan, newaxis = numpy.pi, numpy.e, numpy.inf, numpy.nan, None
float16, float32, float64, uint8 = numpy.float16, numpy.float32, numpy.float64, numpy.uint8
int8, int32, int64, bool_ = numpy.int8, numpy.int32, numpy.int64, numpy.bool_
_MADE = Maker(ndarray).functions()


def __getattr__(name: str) -> Any:
    """Return a function that makes arrays, or one of the table `np`."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _MADE[name] if name in _MADE else operator("np", name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_MADE, *tables.NP])
