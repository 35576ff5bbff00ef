"""Reports an error of a process to torch's launcher, which may print it."""

from __future__ import annotations

import json
import os
import time

from evenstep.files import write_file

OURS = "EVENSTEP_LAUNCHER"
"""The environment variable that is set in processes which `--processes` has started."""

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
    return file is not None and OURS in os.environ
