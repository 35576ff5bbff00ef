"""The C part of portable arithmetic, compiled: one shared library for each kind of processor.

Evenstep's build runs this file (`build_portable.py`), and so may you: `python -m
evenstep.arithmetic.compile`. It imports nothing but the standard library.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "c"
LIBRARIES = HERE / "lib"

FLAGS = (
    *("-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"),
    # The bits are those that the language fixes: no contraction to fused multiply-adds, none of the
    # liberties of -ffast-math. What the other two take away is errno and traps, which nobody reads.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)

VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "plain": ("-march=x86-64",),
        "avx2": ("-march=haswell",),
        "avx512": ("-march=skylake-avx512", "-mprefer-vector-width=512"),
    },
    "aarch64": {"plain": ("-march=armv8-a",)},
}
"""The libraries for each kind of machine, and what the compiler may use in each."""

NAMES = {"amd64": "x86_64", "arm64": "aarch64"}  # of machines, on other systems


def machine() -> str:
    """Return the name of this machine's instruction set."""
    name = platform.machine().lower()
    return NAMES.get(name, name)


def compiler() -> str | None:
    """Return the C compiler: `cc`, `gcc` or `clang`; None if there is none."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def compile_all(
    folder: Path = LIBRARIES, with_compiler: str | None = None, target: str | None = None
) -> list[Path]:
    """Compile the libraries of a machine into `folder`, and return their paths.

    Args:
        folder: the folder; it is made.
        with_compiler: the compiler's command; None for `compiler()`.
        target: the machine to compile for; None for this one. The compiler must be made for it.

    Raises:
        FileNotFoundError: there is no C compiler.
        subprocess.CalledProcessError: the compiler failed.
    """
    command = with_compiler or compiler()
    if command is None:
        raise FileNotFoundError("no C compiler (cc, gcc or clang) was found")
    variants = VARIANTS.get(target or machine(), {"plain": ()})
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(variant: str) -> Path:
        path, draft = folder / f"{variant}.so", folder / f"{variant}.{os.getpid()}.tmp"
        options = (*FLAGS, *variants[variant], f'-DVARIANT="{variant}"')
        sources = sorted(map(str, SOURCES.glob("*.c")))
        subprocess.run(  # noqa: S603 - the compiler of the person who installs evenstep
            [command, *options, *sources, "-o", str(draft)], check=True
        )
        return draft.replace(path)

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        return [*workers.map(compile_one, variants)]


if __name__ == "__main__":
    for path in compile_all():
        sys.stdout.write(f"{path}\n")
