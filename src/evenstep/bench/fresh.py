"""Calls a module's `measure` in a fresh process, and reads the JSON that it returns."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep.bench.machine import require_linux

_STEERING = ("OMP_", "MKL_", "KMP_", "GOMP_", "TORCH_", "MALLOC_", "LD_PRELOAD")
"""Prefixes of environment variables that control threads and allocators."""

_TIMEOUT_S = 600
_ERROR = re.compile(r"[\w.]+(Error|Exception): ")


class RunFailedError(Exception):
    """A fresh process failed, or printed no JSON line.

    Attributes:
        reason: the last line of its stderr that names an error.
    """

    def __init__(self, message: str, errors: str) -> None:
        super().__init__(f"{message}:\n{errors}")
        lines = errors.strip().splitlines() or ["the process printed no error"]
        self.reason = next(filter(_ERROR.match, reversed(lines)), lines[-1])


def command_of(module: str, job: Mapping[str, Any], launcher: Sequence[str] = ()) -> list[str]:
    """Return the command line that prints what `measure(job)` of a module returns.

    Args:
        module: the module, such as "evenstep.bench.contenders".
        job: the argument.
        launcher: a launching module and its options, such as ("torch.distributed.run", ...).
    """
    modules = ["-m", *launcher] if launcher else []
    return [sys.executable, *modules, "-m", "evenstep.bench", module, json.dumps(job)]


def run_module(
    module: str, job: Mapping[str, Any], launcher: Sequence[str] = (), **more: Any
) -> dict[str, Any]:
    """Run `command_of(module, job, launcher)` as `run_commands` does."""
    return run_commands([command_of(module, job, launcher)], **more)


def run_commands(
    commands: Sequence[Sequence[str]],
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> dict[str, Any]:
    """Run commands at the same time and return the JSON object that one of them prints.

    Variables that control threads and allocators are not inherited, so that every run starts from
    torch's defaults. The processes and their children are stopped after the timeout.

    Args:
        commands: the command lines.
        folder: the working directory; None for the current one.
        variables: environment variables to add.
        timeout_s: the longest time for each.

    Raises:
        InputError: this is not Linux.
        RunFailedError: with what the processes wrote to stderr.
    """
    require_linux()
    processes: list[subprocess.Popen[str]] = []
    try:
        processes.extend(
            subprocess.Popen(
                command,
                cwd=folder,
                env=clean_environment(os.environ) | dict(variables or {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for command in commands
        )
        outputs = [process.communicate(timeout=timeout_s) for process in processes]
    except BaseException:
        for process in processes:
            _stop(process)
        raise
    results = [found for output, _ in outputs if (found := last_json_line(output)) is not None]
    codes = [process.returncode for process in processes]
    if any(codes) or not results:
        message = f"{' '.join(commands[0])} failed with exit codes {codes}"
        raise RunFailedError(message, "\n".join(errors for _, errors in outputs))
    return results[0]


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the variables that control threads and allocators."""
    return {name: value for name, value in environment.items() if not name.startswith(_STEERING)}


def last_json_line(output: str) -> dict[str, Any] | None:
    """Return the last line of `output` that is a JSON object; None if there is none."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                found: dict[str, Any] = json.loads(line)
                return found
    return None


def _stop(process: subprocess.Popen[str]) -> None:
    """Terminate the process, so that a launcher ends its workers; then kill it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=10)
            return
