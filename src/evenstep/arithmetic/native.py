"""The C part of portable arithmetic, loaded: the library that fits the processor."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from evenstep.arithmetic.compile import LIBRARIES, ON_WINDOWS
from evenstep.errors import InputError

_ALIGNMENT = 64  # bytes
_VARIANTS = ("plain", "avx2", "avx512")  # each runs on fewer processors

_KINDS = {"p": ctypes.c_void_p, "l": ctypes.c_long, "f": ctypes.c_float, "d": ctypes.c_double}


class Function:
    """A C function that returns nothing; the library is loaded at the first call.

    A call releases the interpreter's lock.
    """

    __slots__ = ("_call", "_kinds", "_name")

    def __init__(self, name: str, arguments: str) -> None:
        """Name a function.

        Args:
            name: its name in C.
            arguments: a letter for each argument: "p" for a pointer (an address), "l" for a
                `long`, "f" for a `float`, "d" for a `double`.
        """
        self._name = name
        self._kinds = [_KINDS[letter] for letter in arguments]
        self._call: Callable[..., None] | None = None
        _FUNCTIONS.append(self)

    def __call__(self, *args: int | float) -> None:
        """Call the function."""
        (self._call or self._bound(library()))(*args)

    def _bound(self, to: ctypes.CDLL) -> Callable[..., None]:
        found = getattr(to, self._name)
        found.argtypes = self._kinds
        found.restype = None
        self._call = found
        return found


_FUNCTIONS: list[Function] = []


@functools.cache
def library(variant: str | None = None) -> ctypes.CDLL:
    """Load the library for this processor, or that of a variant.

    Raises:
        InputError: evenstep was installed without its C part, there is no such variant, or the
            processor can't run it.
    """
    fit = runnable()
    if not fit:
        if sys.platform == "win32":
            raise InputError(ON_WINDOWS)
        raise InputError(
            "portable arithmetic needs the C part of evenstep, which is missing: there was no C "
            "compiler when evenstep was installed. Install one (gcc or clang), and run "
            "`python -m evenstep.arithmetic.compile`"
        )
    if variant is None:
        variant = _variant(asks=True)
    if variant not in fit:
        raise InputError(f"EVENSTEP_PORTABLE={variant}: expected one of {', '.join(fit)}")
    found = ctypes.CDLL(str(LIBRARIES / f"{variant}.so"))
    found.portable_name.restype = ctypes.c_char_p
    return found


def runnable() -> list[str]:
    """Return the variants that were compiled and that this processor runs, the smallest first."""
    if not (LIBRARIES / "plain.so").exists():
        return []
    fit = _VARIANTS[: _VARIANTS.index(_variant(asks=False)) + 1]
    return [variant for variant in fit if (LIBRARIES / f"{variant}.so").exists()]


def _variant(*, asks: bool) -> str:
    """Return the largest variant for this processor; or, if `asks`, what a test asks for."""
    choose = ctypes.CDLL(str(LIBRARIES / "plain.so")).portable_variant
    choose.restype = ctypes.c_char_p
    name: str = choose(ctypes.c_long(asks)).decode()
    return name


@contextmanager
def using(variant: str) -> Iterator[None]:
    """Inside `with`, all functions are those of one variant: for tests, in one thread."""
    try:
        for one in _FUNCTIONS:
            one._bound(library(variant))
        yield
    finally:
        for one in _FUNCTIONS:
            one._bound(library())


class _Scratch(threading.local):
    memory: torch.Tensor
    floats = -1
    address = 0


_scratch = _Scratch()


def scratch(floats: int) -> int:
    """Return the address of at least `floats` float32 numbers of working memory, uninitialised.

    The memory belongs to the calling thread, which gets the same again at its next call. Its
    address is a multiple of 64 bytes.
    """
    if floats > _scratch.floats:
        _scratch.memory = torch.empty(4 * floats + _ALIGNMENT, dtype=torch.uint8)
        _scratch.floats = floats
        begins = _scratch.memory.data_ptr()
        _scratch.address = begins + -begins % _ALIGNMENT
    return _scratch.address
