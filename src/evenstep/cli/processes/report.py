"""What the processes of `--processes` report to their launcher: errors, and where time went."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from evenstep.files import write_file
from evenstep.profiling.accounting import DeviceShares

FOLDER = "EVENSTEP_LAUNCHER"
"""The environment variable with the launcher's folder, in processes that it has started."""

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # the file in which torch's launcher expects an error


def report_to_launcher(line: str, code: int, *, follows: bool) -> bool:
    """Report an error to torch's launcher, if it started this process.

    Args:
        line: the line to print.
        code: the exit code.
        follows: whether the error follows from another process's error.

    Returns:
        Whether `launch` started this process, and so will print the error.
    """
    file = os.environ.get(_ERROR_FILE)
    if file is not None:
        now = time.time()
        details = {"py_callstack": "", "timestamp": str(int(now)), "at": now}
        message = {"message": line, "extraInfo": details}
        report = {"message": message, "code": code, "follows": follows}
        write_file(file, json.dumps(report))
    return file is not None and FOLDER in os.environ


def report_shares(shares: Sequence[DeviceShares]) -> bool:
    """Report where the time of this process's devices went, if `launch` has started it.

    Returns:
        Whether `launch` will print it.
    """
    folder = os.environ.get(FOLDER)
    if folder is not None:
        named = [dataclasses.asdict(own) for own in shares]
        write_file(_shares_file(Path(folder), int(os.environ["RANK"])), json.dumps(named))
    return folder is not None


def reported_shares(folder: Path, processes: int) -> list[DeviceShares]:
    """Return what the processes have reported; devices are named by their process too."""
    files = {rank: _shares_file(folder, rank) for rank in range(processes)}
    return [
        DeviceShares(**{**own, "device": f"process {rank}, {own['device']}"})
        for rank, file in files.items()
        if file.exists()
        for own in json.loads(file.read_text(encoding="utf-8"))
    ]


def _shares_file(folder: Path, rank: int) -> Path:
    return folder / f"shares-{rank}.json"
