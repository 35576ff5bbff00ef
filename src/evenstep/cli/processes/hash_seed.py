"""Fixes how Python hashes strings, which differs from process to process by default.

A set of strings is iterated in the order of their hashes. Python reads the seed when it starts, so
the program starts itself again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

HASH_SEED = "PYTHONHASHSEED"
_PROGRAMS = {"evenstep", "__main__"}  # the command, and `python -m evenstep`


def fix_hash_seed() -> None:
    """Start `evenstep train` again with a fixed seed, unless the user has set one.

    A program of the user's own that calls the command is left alone.
    """
    name, *arguments = sys.argv or [""]
    is_own = Path(name).stem in _PROGRAMS and sys.orig_argv[-len(arguments) :] == arguments
    is_set = HASH_SEED in os.environ
    if os.name == "posix" and is_own and arguments[:1] == ["train"] and not is_set:
        os.environ[HASH_SEED] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - itself
