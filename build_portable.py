"""Compiles the C part of portable arithmetic when evenstep is built: see `evenstep.arithmetic`."""

from __future__ import annotations

import subprocess
import sysconfig
from importlib import util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PROGRAM = Path(__file__).parent / "src" / "evenstep" / "arithmetic" / "compile.py"


class PortableHook(BuildHookInterface):
    """Adds the libraries to the wheel. Without a compiler, the wheel is built without them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries in place."""
        spec = util.spec_from_file_location("compile_portable", PROGRAM)
        assert spec is not None
        assert spec.loader is not None
        compiling = util.module_from_spec(spec)
        spec.loader.exec_module(compiling)
        try:
            compiling.compile_all()
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"evenstep is built without portable arithmetic: {error}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
