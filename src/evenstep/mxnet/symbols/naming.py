"""Names of blocks and of what they compute: `dense0_`, `hybridnet0_relu0`."""

from __future__ import annotations

import contextvars
import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Scope:
    """A prefix, and how many names of each kind were given out below it."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._counts: Counter[str] = Counter()

    def numbered(self, hint: str) -> str:
        """Return the next name of a kind: `relu0`, `relu1`, ..., after the prefix."""
        number = self._counts[hint]
        self._counts[hint] += 1
        return f"{self.prefix}{hint}{number}"


_SCOPE: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("scope", default=None)


def scope() -> Scope:
    """Return the scope that is entered now, or that of the program."""
    return _SCOPE.get() or _outermost()


@functools.cache
def _outermost() -> Scope:
    return Scope("")


@contextmanager
def entered(inner: Scope) -> Iterator[None]:
    """Enter a scope inside the `with` block."""
    token = _SCOPE.set(inner)
    try:
        yield
    finally:
        _SCOPE.reset(token)
