"""`evenstep record`: runs a command, and records every process of it that trains with torch."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from evenstep.cli.records.child import FOLDER, VARIABLE
from evenstep.errors import InputError
from evenstep.files import write_file

_SITE = "from evenstep.cli.records.child import begin\n\nbegin()\n"


def record(
    out: Path,
    command: Sequence[str],
    options: Mapping[str, Any],
    *,
    environment: Mapping[str, str],
) -> int:
    """Run a command and record it; return its exit code.

    Args:
        out: the record.
        command: what to run.
        options: of `evenstep.recording.Recorder`.
        environment: the variables of the user's environment.

    Raises:
        InputError: the command or script doesn't exist, something is at `out`, or no folder can be
            made there.
    """
    if out.exists():
        raise InputError(f"{out} exists: give --out the path of a new record")
    is_script = command[0].endswith(".py")
    if is_script and not Path(command[0]).is_file():
        raise InputError(f"there is no script {command[0]}")
    started = [sys.executable, *command] if is_script else [*command]
    if shutil.which(started[0]) is None:
        raise InputError(
            f"got the command {started[0]}, which can't be run: give a script or a program (for a "
            f"module, `python -m name`)"
        )
    try:
        out.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"{out} can't be made ({error.strerror or error})") from error
    with tempfile.TemporaryDirectory(prefix="evenstep-") as folder:
        write_file(Path(folder, "sitecustomize.py"), _SITE)
        paths = [folder, *filter(None, [environment.get("PYTHONPATH")])]
        variables = {
            **environment,
            VARIABLE: json.dumps({"folder": str(out.resolve()), "launched": [*command], **options}),
            FOLDER: folder,
            "PYTHONPATH": os.pathsep.join(paths),
        }
        click.echo(
            f"recording at most {options['steps']} steps, {options['most_nbytes'] >> 20} MB for "
            f"each process",
            err=True,
        )
        code = _run(started, variables)
    if not any(out.iterdir()):
        out.rmdir()
        click.echo(
            f"evenstep: no model was called in {' '.join(command)}: nothing was recorded", err=True
        )
        return code or 1
    if not any(map(_has_update, out.glob("process-*.jsonl"))):
        click.echo(
            f"evenstep: no optimizer of torch.optim made an update in {' '.join(command)}: "
            f"`evenstep compare` needs some",
            err=True,
        )
    return code


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command; return its exit code, as a shell has it, even if it ends by a signal.

    Ctrl-C reaches the command, too, which may take its time to save what it has. (`subprocess.run`
    would kill it after a quarter of a second.) SIGTERM is passed on.
    """
    with subprocess.Popen(command, env=environment) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            while (code := process.poll()) is None:
                with contextlib.suppress(KeyboardInterrupt):
                    code = process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)
    return 128 - code if code < 0 else code


def _has_update(file: Path) -> bool:
    with file.open("rb") as lines:
        return any(line.startswith(b'{"what":"update"') for line in lines)
