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
            libraries = compiling.compile_all()
        except (OSError, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"evenstep is built without portable arithmetic: {error}")
            return
        for library in libraries:
            build_data["force_include"][library] = f"evenstep/arithmetic/lib/{library.name}"
        platform = compiling.platform_tag(libraries) or sysconfig.get_platform()
        build_data["pure_python"] = False
        # They have a plain C interface, so any Python runs them.
        build_data["tag"] = f"py3-none-{platform.replace('-', '_').replace('.', '_')}"
