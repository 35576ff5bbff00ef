"""Run a piece of a benchmark in a fresh process, and read the one JSON line that it prints."""

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

_STEERING = ("OMP_", "MKL_", "KMP_", "GOMP_", "TORCH_", "MALLOC_", "LD_PRELOAD")
"""Beginnings of environment variables that steer threads and allocators."""


_ERROR = re.compile(r"[\w.]+(Error|Exception): ")


class RunFailedError(Exception):
    """A fresh process ended with an error, or without its line.

    Attributes:
        reason: the last line of what it wrote to stderr that tells of an error.
    """

    def __init__(self, message: str, errors: str) -> None:
        super().__init__(f"{message}:\n{errors}")
        lines = errors.strip().splitlines() or ["it said nothing"]
        self.reason = next(filter(_ERROR.match, reversed(lines)), lines[-1])


def run_module(
    module: str,
    job: Mapping[str, Any],
    *,
    folder: Path | None = None,
    launcher: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    timeout_s: float = 600,
) -> dict[str, Any]:
    """Run `python -m [launcher] module JOB` and return the object that it prints.

    Args:
        module: such as "evenstep.bench.contenders.plain".
        job: its one argument, passed as JSON.
        folder: where it runs; by default the current one.
        launcher: a launching module and its options, such as ("torch.distributed.run", ...).
        variables: environment variables to add; those that steer threads and allocators are taken
            out of the inherited environment first, so that every run starts from torch's defaults.
        timeout_s: after which the process and its children are stopped.

    Raises:
        RunFailedError: with what the process wrote to stderr.
    """
    module_arguments = ["-m", *launcher, "-m", module] if launcher else ["-m", module]
    process = subprocess.Popen(
        [sys.executable, *module_arguments, json.dumps(job)],
        cwd=folder,
        env=clean_environment(os.environ) | dict(variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except BaseException:
        _stop(process)
        raise
    result = last_json_line(output)
    if process.returncode or result is None:
        raise RunFailedError(f"{module} failed ({process.returncode}) with {dict(job)}", errors)
    return result


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without what steers threads and allocators."""
    return {name: value for name, value in environment.items() if not name.startswith(_STEERING)}


def last_json_line(output: str) -> dict[str, Any] | None:
    """Return the last line of `output` that is a JSON object; None without one."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                found: dict[str, Any] = json.loads(line)
                return found
    return None


def _stop(process: subprocess.Popen[str]) -> None:
    """Ask the process to end, so that a launcher ends its workers; then make it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=10)
            return
