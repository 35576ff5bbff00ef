"""Portable arithmetic: the same bits on every processor.

Not to be confused with evenstep's promise, which holds for torch's own arithmetic, too: the same
bits on any number of devices *of one kind*.
"""

from evenstep.arithmetic.portable import (
    is_portable,
    is_portable_here,
    portable,
    portable_facts,
    within,
)

__all__ = ["is_portable", "is_portable_here", "portable", "portable_facts", "within"]
