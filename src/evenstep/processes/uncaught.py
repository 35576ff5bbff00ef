"""An error is shown once: by the process that has it, not by all that end because of it."""

from __future__ import annotations

import functools
import sys
from types import TracebackType

from evenstep.errors import PeerError


@functools.cache
def show_told_in_a_line() -> None:
    """From now on, show an uncaught error that another process shows in a line, no traceback.

    It takes effect when the script ends, so it stays for the life of the process.
    """
    before = sys.excepthook

    def show(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, PeerError) and error.told:
            print(f"evenstep: {' '.join(str(error).split())}", file=sys.stderr)
        else:
            before(kind, error, traceback)

    sys.excepthook = show
