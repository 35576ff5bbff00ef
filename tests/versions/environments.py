"""Environments with the versions of torch and Python that evenstep is tested with.

They are made by uv in `.versions`, and kept for later runs.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".versions"
TEST_PACKAGES = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "expecttest")
UV = (sys.executable, "-m", "uv")

OF_CUDA_12 = (
    *("cublas", "cudnn", "cufft", "curand", "cusolver", "cusparse", "cusparselt"),
    *("nccl", "nvshmem", "nvjitlink", "cuda-nvrtc", "cufile"),
)
OF_CUDA_13 = ("cudnn", "cusparselt", "nccl", "nvshmem")
LARGE = (
    *("triton", "cuda-toolkit", "cuda-bindings"),
    *(f"nvidia-{name}-cu12" for name in OF_CUDA_12),
    *(f"nvidia-{name}-cu13" for name in OF_CUDA_13),
)
"""What a CUDA build of torch depends on, some gigabytes, and a CPU doesn't need."""


class MissingError(Exception):
    """An environment can't be made here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """Versions of torch and Python, the other dependencies' resolution, and what is tested.

    Attributes:
        python: its version; one with a "t" is free-threaded.
        resolution: "highest", or "lowest-direct" for the oldest versions that pyproject.toml names.
        tests: "all" (except the slow ones) or "quick": the tests that are run.
    """

    torch: str
    python: str
    resolution: str = "highest"
    tests: str = "quick"

    def __str__(self) -> str:
        oldest = ", oldest dependencies" if self.resolution != "highest" else ""
        return f"torch {self.torch}, Python {self.python}{oldest}"

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return FOLDER / re.sub("[ ,]+", "-", str(self))

    @property
    def interpreter(self) -> Path:
        """Its Python."""
        inside = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
        return self.folder.joinpath(*inside)

    @property
    def variables(self) -> dict[str, str]:
        """Variables for its processes: a free-threaded one lets no module ask for the lock."""
        return {"PYTHON_GIL": "0"} if self.python.endswith("t") else {}

    @property
    def is_made(self) -> bool:
        """Whether it is there, made by this run or an earlier one."""
        return (self.folder / "made").exists()


ENVIRONMENTS = (
    Environment("2.6.0", "3.10", "lowest-direct"),
    Environment("2.6.0", "3.10", tests="all"),
    Environment("2.8.0", "3.12"),
    Environment("2.9.1", "3.12"),
    Environment("2.11.0", "3.10"),
    Environment("2.12.1", "3.13"),
    Environment("2.13.0", "3.11"),
    Environment("2.14.1", "3.12"),
    Environment("2.15.0", "3.13", tests="all"),
    Environment("2.15.0", "3.14"),
    Environment("2.15.0", "3.14t"),
)


def build_wheel() -> Path:
    """Build this revision's wheel, which also compiles the C part for the tests."""
    out = FOLDER / "wheel"
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run([*UV, "build", "-q", "--wheel", "--out-dir", out, ROOT], check=True)
    (wheel,) = out.glob("*.whl")
    return wheel


def make(one: Environment, wheel: Path) -> None:
    """Make an environment, unless it is there, and install the wheel in it.

    Raises:
        MissingError: the interpreter or a package can't be had.
    """
    made = one.folder / "made"
    wanted = f"{one} {one.tests}\n{(ROOT / 'pyproject.toml').read_text('utf-8')}"
    if not made.exists() or made.read_text("utf-8") != wanted:
        uv("venv", "--clear", "--python", one.python, one.folder)
        _install_torch(one)
        project = ("-r", ROOT / "pyproject.toml")
        _install(one, *project, "--resolution", one.resolution, f"torch=={one.torch}")
        _install(one, *TEST_PACKAGES, f"torch=={one.torch}")
        if one.tests == "all":
            _install(one, *project, "--extra", "dev", f"torch=={one.torch}")
        made.write_text(wanted, "utf-8")
    _install(one, "--no-deps", "--reinstall-package", "evenstep", wheel)


def _install_torch(one: Environment) -> None:
    """Install a CPU build of torch, or else what PyPI has without CUDA's libraries."""
    try:
        _install(one, "--torch-backend", "cpu", f"torch=={one.torch}")
    except MissingError:
        small = ("nvidia-cuda-runtime", "nvidia-cuda-cupti", "nvidia-nvtx")
        is_of_cuda_12 = tuple(map(int, one.torch.split(".")[:2])) < (2, 11)
        _install(one, f"torch=={one.torch}", *([] if is_of_cuda_12 else small))
        place = next(one.folder.glob("[Ll]ib*/**/site-packages/torch"))
        replace_cuda(place / "lib")


def _install(one: Environment, *arguments: object) -> None:
    overrides = FOLDER / "overrides.txt"
    overrides.write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in LARGE), "utf-8")
    uv("pip", "install", "--python", one.interpreter, "--override", overrides, *arguments)


def uv(*arguments: object) -> None:
    """Run uv, which finds the interpreters of pyenv too.

    Raises:
        MissingError: with what uv said.
    """
    pyenv = sorted(map(str, Path.home().glob(".pyenv/versions/*/bin")))
    path = os.pathsep.join([*pyenv, os.environ["PATH"]])
    done = subprocess.run(
        [*UV, *map(str, arguments)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise MissingError(" ".join(done.stderr.split())[-300:])


def replace_cuda(folder: Path) -> None:
    """Put a library in the place of those of CUDA that are missing: each of its functions fails.

    A CUDA build of torch needs them to be imported, and calls none of them on a CPU.
    """
    ours = sorted(folder.glob("lib*.so"))
    others = sorted(folder.parents[1].glob("nvidia/**/lib*.so*"))
    needed = set(re.findall(r"NEEDED.*\[(lib(?:cu|nccl|nv).*)\]", _said("readelf", "-d", *ours)))
    missing = sorted(needed - {file.name for file in [*ours, *others]} - {"libcuda.so.1"})
    if not missing:
        return
    there = _symbols("--defined-only", *ours, *others)
    called = {
        name: version
        for name, version in _symbols("--undefined-only", *ours).items()
        if name not in there and re.match("cu|nccl|nv", name)
    }
    versions: dict[str, list[str]] = {}
    for name, version in called.items():
        versions.setdefault(version, []).append(name)
    script = FOLDER / "versions.map"
    nodes = [f"{one} {{ {'; '.join(names)}; }};\n" for one, names in versions.items() if one]
    script.write_text("".join(nodes), "utf-8")
    options = ("-shared", "-fno-builtin", "-w", f"-Wl,--version-script={script}", "-x", "c", "-")
    code = "".join(f"long {name}(void) {{ return 1; }}\n" for name in called)
    subprocess.run(["gcc", *options, "-o", folder / missing[0]], input=code, text=True, check=True)
    for name in missing[1:]:
        (folder / name).symlink_to(missing[0])


def _symbols(which: str, *files: Path) -> dict[str, str]:
    """Return the dynamic symbols of libraries, each with its version."""
    names = [line.split()[-1] for line in _said("nm", "-D", which, *files).splitlines() if line]
    return {name: version for name, _, version in (one.partition("@") for one in names)}


def _said(*command: object) -> str:
    return subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=True
    ).stdout.replace("@@", "@")
