"""Says on a terminal that something is loaded, which takes seconds."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_ERASED_LINE = "\r\x1b[K"


@contextlib.contextmanager
def loading(what: str) -> Iterator[None]:
    """Inside `with`, a terminal shows "loading ..."; afterwards the line is erased."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()  # None: it was closed
    is_shown = is_terminal and os.environ.get("TERM") != "dumb"
    if is_shown:
        print(f"loading {what} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if is_shown:
            print(_ERASED_LINE, end="", file=sys.stderr, flush=True)
