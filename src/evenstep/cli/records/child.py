"""Begins to record in each Python process of a recorded command, as soon as it has imported torch.

The processes find a `sitecustomize` on their path that calls `begin`, and what to record in a
variable of the environment. Nothing is imported before the script itself imports torch.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "EVENSTEP_RECORD"
"""Holds the folder of the record and the options of the recorder, as JSON."""

FOLDER = "EVENSTEP_RECORD_PATH"
"""The folder of the `sitecustomize`."""

_NAMED = (
    "OMP_",
    "MKL_",
    "KMP_",
    "CUDA_",
    "CUBLAS_",
    "NCCL_",
    "TORCH_",
    "PYTORCH_",
    "PYTHONHASHSEED",
    "PL_",
    "LT_",
    "ACCELERATE_",
)
_RANKS = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))


def begin() -> None:
    """Record this process from the moment on at which torch is imported."""
    _run_hidden()
    if VARIABLE in os.environ:
        sys.meta_path.insert(0, _After("torch", _start))


def _start() -> None:
    from evenstep.recording import Recorder

    given = json.loads(os.environ[VARIABLE])
    recorder = Recorder(
        Path(given.pop("folder")),
        rank=_rank(),
        command=sys.argv,
        environment={name: value for name, value in os.environ.items() if name.startswith(_NAMED)},
        **given,
    )
    recorder.start()
    atexit.register(recorder.stop)


def _rank() -> tuple[int, int]:
    for rank, world in _RANKS:
        if rank in os.environ and world in os.environ:
            return int(os.environ[rank]), int(os.environ[world])
    return 0, 1


def _run_hidden() -> None:
    """Import the `sitecustomize` that Python would have found without the recorder's."""
    own = os.environ.get(FOLDER, "")
    others = [place for place in sys.path if place != own]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


class _After(importlib.abc.MetaPathFinder):
    """Calls a function once a module was imported.

    Args:
        name: the module.
        call: the function.
    """

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name = name
        self._call = call
        self._is_asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec, with a loader that calls the function at its end."""
        if fullname != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Calling(spec.loader, self._run)
        return spec

    def _run(self) -> None:
        """Call the function, once: others may have asked for the module without importing it."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._call()


class _Calling(importlib.abc.Loader):
    def __init__(self, loader: Any, call: Callable[[], None]) -> None:
        self._loader = loader
        self._call = call

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._call()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
