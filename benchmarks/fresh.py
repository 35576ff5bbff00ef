"""Run a piece of a benchmark in a fresh process, and read the one JSON line that it prints."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_THREADS = ("OMP_", "MKL_", "KMP_", "GOMP_", "TORCH_", "MALLOC_", "LD_PRELOAD")


class RunFailedError(Exception):
    """A fresh process ended with an error, or without its line."""


def run_module(
    module: str,
    job: Mapping[str, Any],
    *,
    launcher: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    timeout_s: float = 600,
) -> dict[str, Any]:
    """Run `python -m [launcher] module JOB` and return the object that it prints.

    Args:
        module: below `benchmarks`, such as "contenders.plain".
        job: its one argument, passed as JSON.
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
        cwd=_HERE,
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
        raise RunFailedError(f"{module} failed ({process.returncode}) with {dict(job)}:\n{errors}")
    return result


def _stop(process: subprocess.Popen[str]) -> None:
    """Ask the process to end, so that a launcher ends its workers; then make it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=10)
            return


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without what steers threads and allocators."""
    return {name: value for name, value in environment.items() if not name.startswith(_THREADS)}


def last_json_line(output: str) -> dict[str, Any] | None:
    """Return the last line of `output` that is a JSON object; None without one."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(line)
    return None
