"""A handle to a number that a step computes."""

from __future__ import annotations


class Handle:
    """The mean loss of a step; `float(handle)` waits for it."""

    def __init__(self, value: float) -> None:
        self._value = value

    def wait_to_read(self) -> None:
        """Block until the value is there."""

    def item(self) -> float:
        """Wait, and return the value."""
        self.wait_to_read()
        return self._value

    __float__ = item

    def __repr__(self) -> str:
        return f"Handle({self.item()})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)
