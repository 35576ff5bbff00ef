"""`--processes`: runs the same command in several processes, started by torch's launcher.

Only the first process prints. Each process reports its error to the launcher, which prints the one
that the others follow from.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from evenstep.cli.processes import loopback_rendezvous
from evenstep.cli.processes.hash_seed import HASH_SEED
from evenstep.cli.processes.report import FOLDER, reported_shares
from evenstep.distributed.secret import SECRET_FILE
from evenstep.errors import InputError
from evenstep.files import write_file
from evenstep.profiling.accounting import DeviceShares


def launch(processes: int, max_restarts: int, arguments: Sequence[str]) -> list[DeviceShares]:
    """Run `evenstep` with `arguments` in several processes; exit if one of them fails.

    Returns:
        Where the time of the devices of all processes went; none if no step was trained.

    Raises:
        InputError: this is Windows, where nobody has made it work yet.
    """
    if sys.platform == "win32":
        raise InputError("got --processes on Windows, where it does not work yet: use --devices")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    loopback_rendezvous.register()
    with tempfile.TemporaryDirectory(prefix="evenstep-") as folder:
        own = {FOLDER: folder, HASH_SEED: "0", SECRET_FILE: str(Path(folder) / "secret")}
        added = {name: value for name, value in own.items() if name not in os.environ}
        if SECRET_FILE in added:  # nobody else may enter the folder
            write_file(added[SECRET_FILE], secrets.token_hex(32))
        os.environ.update(added)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend=loopback_rendezvous.BACKEND,
            max_restarts=max_restarts,
            logs_specs=DefaultLogsSpecs(folder, dict.fromkeys(range(1, processes), Std.ALL)),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "evenstep", *arguments)
        except (ChildFailedError, SignalException) as error:
            stopped = 128 + error.sigval if isinstance(error, SignalException) else 1
            line, code = _first_error(Path(folder), default=stopped)
            if isinstance(error, ChildFailedError):
                click.echo(_tracebacks(Path(folder)), err=True, nl=False)
                line = line or _describe_exit(error.failures)
            click.echo(line or "evenstep: stopped", err=True)
            sys.exit(code)
        finally:
            for name in added:
                del os.environ[name]
        return reported_shares(Path(folder), processes)


def _first_error(folder: Path, *, default: int) -> tuple[str | None, int]:
    """Return the line and the exit code of the error that the others follow from.

    Without a report of any process, these are None and `default`. `folder` belongs to the launcher;
    it has a folder for each attempt, and in it one for each process.
    """
    reports: list[tuple[int, bool, float, str | None, int]] = []
    for file in folder.glob("*/attempt_*/*/error.json"):
        report = json.loads(file.read_text(encoding="utf-8"))
        message, details = report["message"]["message"], report["message"]["extraInfo"]
        attempt = _number_of(file.parents[1])
        reports.append((-attempt, report["follows"], details["at"], message, report["code"]))
    *_, line, code = min(reports, default=(0, False, 0.0, None, default))
    return line, code


def _tracebacks(folder: Path) -> str:
    """Return the stderr of the last attempt's processes that did not report an error."""
    attempts = sorted(folder.glob("*/attempt_*"), key=_number_of)
    places = sorted(attempts[-1].iterdir()) if attempts else []
    files = [place / "stderr.log" for place in places if not (place / "error.json").exists()]
    return "".join(file.read_text(errors="replace") for file in files if file.exists())


def _number_of(attempt: Path) -> int:
    return int(attempt.name.removeprefix("attempt_"))


def _describe_exit(failures: Mapping[int, ProcessFailure]) -> str:
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    how = f"signal {-first.exitcode}" if first.exitcode < 0 else f"exit code {first.exitcode}"
    return f"evenstep: process {first.local_rank} ended without an error message ({how})"
