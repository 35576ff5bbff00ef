"""The C part of portable arithmetic, compiled: one shared library for each kind of processor.

Evenstep's build runs this file (`build_portable.py`), and so may you: `python -m
evenstep.arithmetic.compile`. It imports nothing but the standard library.
"""

from __future__ import annotations

import collections
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "c"
LIBRARIES = HERE / "lib"

FLAGS = (
    *("-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
    # The bits are those that the language fixes: no contraction to fused multiply-adds, none of the
    # liberties of -ffast-math. What the other two take away is errno and traps, which nobody reads.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
OLDEST_MACOS = 11  # the first for ARM

VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "plain": ("-march=x86-64",),
        "avx2": ("-march=haswell",),
        "avx512": ("-march=skylake-avx512", "-mprefer-vector-width=512"),
    },
    "aarch64": {"plain": ("-march=armv8-a",)},
}
"""The libraries for each kind of machine, and what the compiler may use in each."""

ON_WINDOWS = "portable arithmetic is compiled on Linux and macOS only"

NAMES = {"amd64": "x86_64", "arm64": "aarch64"}  # of machines, on other systems


def machine() -> str:
    """Return the name of this machine's instruction set."""
    name = platform.machine().lower()
    return NAMES.get(name, name)


def on_macos() -> tuple[str, ...]:
    """Return what a compiler is told on macOS: one kind of processor, and the oldest system."""
    return ("-arch", platform.machine(), f"-mmacosx-version-min={OLDEST_MACOS}.0")


def platform_tag(libraries: Sequence[Path]) -> str | None:
    """Return what systems run these libraries, as names of wheels say it; None if unknown.

    On Linux: the oldest glibc that has all functions they call ("manylinux", PEP 600), but none
    older than 2.17, which is the oldest that pip knows for all processors.
    """
    if sys.platform == "darwin":
        return f"macosx_{OLDEST_MACOS}_0_{platform.machine()}"
    if platform.libc_ver()[0] != "glibc":
        return None
    needed = [re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes()) for library in libraries]
    oldest = max(17, *(int(minor) for minors in needed for minor in minors))
    return f"manylinux_2_{oldest}_{platform.machine()}"


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
        OSError: there is no C compiler, or not on this system.
        subprocess.CalledProcessError: the compiler failed.
    """
    if sys.platform == "win32":  # its `long` has 32 bits
        raise OSError(ON_WINDOWS)
    command = with_compiler or compiler()
    if command is None:
        raise FileNotFoundError("no C compiler (cc, gcc or clang) was found")
    variants = VARIANTS.get(target or machine(), {"plain": ()})
    flags = (*FLAGS, *(on_macos() if sys.platform == "darwin" else ()))
    folder.mkdir(parents=True, exist_ok=True)

    def run(*arguments: object) -> None:
        subprocess.run([command, *map(str, arguments)], check=True)  # noqa: S603

    def compile_one(job: tuple[str, Path]) -> Path:
        variant, source = job
        made = Path(objects) / f"{variant}.{source.stem}.o"
        run(*flags, *variants[variant], f'-DVARIANT="{variant}"', "-c", source, "-o", made)
        return made

    def link(variant: str) -> Path:
        path, draft = folder / f"{variant}.so", Path(objects) / f"{variant}.so"
        parts = sorted(Path(objects).glob(f"{variant}.*.o"))
        run("-shared", *flags, *parts, "-o", draft)
        return Path(shutil.move(draft, path))

    jobs = [(variant, source) for source in SOURCES.glob("*.c") for variant in variants]
    with tempfile.TemporaryDirectory(dir=folder) as objects:
        with ThreadPoolExecutor(os.cpu_count()) as workers:
            collections.deque(workers.map(compile_one, jobs), maxlen=0)
        return [*map(link, variants)]


if __name__ == "__main__":
    for path in compile_all():
        sys.stdout.write(f"{path}\n")
