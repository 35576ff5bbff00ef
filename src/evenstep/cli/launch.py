"""`--processes`: the same command in several processes, started by torch's own launcher.

What the first process prints is seen. Errors are handed to the launcher, which prints one: that
from which the others follow.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from evenstep.cli import meeting

_OURS = "EVENSTEP_LAUNCHER"  # tells a process that this module has started it
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torch's launcher looks for a process's error


def launch(processes: int, max_restarts: int, arguments: Sequence[str]) -> NoReturn:
    """Run `evenstep` with `arguments` in `processes` processes, and exit as they do."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ[_OURS] = "1"
    meeting.register()
    with tempfile.TemporaryDirectory(prefix="evenstep-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend=meeting.BACKEND,
            max_restarts=max_restarts,
            logs_specs=DefaultLogsSpecs(folder, dict.fromkeys(range(1, processes), Std.ALL)),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "evenstep", *arguments)
        except (ChildFailedError, SignalException) as error:
            line, code = first_error(Path(folder))
            if isinstance(error, ChildFailedError):
                click.echo(tracebacks(Path(folder)), err=True, nl=False)
                line = line or _ending_of(error.failures)
            click.echo(line or "evenstep: stopped", err=True)
            sys.exit(code)
    sys.exit(0)


def hand_to_launcher(line: str, code: int, *, follows: bool) -> bool:
    """Leave an error where torch's launcher looks; say whether ours has started this process.

    Args:
        line: what is to be printed.
        code: the exit code.
        follows: whether it follows from another process's error.
    """
    file = os.environ.get(_ERROR_FILE)
    if file is not None:
        now = time.time()
        details = {"py_callstack": "", "timestamp": str(int(now)), "at": now}
        message = {"message": line, "extraInfo": details}
        told = {"message": message, "code": code, "follows": follows}
        Path(file).write_text(json.dumps(told), encoding="utf-8")
    return file is not None and _OURS in os.environ


def first_error(folder: Path) -> tuple[str | None, int]:
    """Return the line that explains the others, if a process has left one, and the exit code.

    Args:
        folder: of the launcher; each attempt has a folder in it, and in that each process.
    """
    told: list[tuple[int, bool, float, str | None, int]] = []
    for file in folder.glob("*/attempt_*/*/error.json"):
        attempt = _number_of(file.parents[1])
        data: Any = json.loads(file.read_text(encoding="utf-8"))
        message, details = data["message"]["message"], data["message"]["extraInfo"]
        told.append((-attempt, data["follows"], details["at"], message, data["code"]))
    *_, line, code = min(told, default=(0, False, 0.0, None, 1))
    return line, code


def tracebacks(folder: Path) -> str:
    """Return what processes that left no line wrote to stderr, in the last attempt."""
    attempts = sorted(folder.glob("*/attempt_*"), key=_number_of)
    places = sorted(attempts[-1].iterdir()) if attempts else []
    files = [place / "stderr.log" for place in places if not (place / "error.json").exists()]
    return "".join(file.read_text(errors="replace") for file in files if file.exists())


def _number_of(attempt: Path) -> int:
    return int(attempt.name.removeprefix("attempt_"))


def _ending_of(failures: Mapping[int, ProcessFailure]) -> str:
    """Say of processes that left no line how the first one ended."""
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    how = f"signal {-first.exitcode}" if first.exitcode < 0 else f"exit code {first.exitcode}"
    return f"evenstep: process {first.local_rank} ended by itself ({how})"
