"""Scripts of `tests/support/jobs`, started as a user starts them."""

import socket
import subprocess
import sys
from pathlib import Path

JOBS = Path(__file__).parent / "jobs"


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def torchrun(processes, job, *arguments, timeout_s=120):
    """Run a job in `processes` processes on this machine; return the finished torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    return subprocess.run(
        [*command, str(processes), str(JOBS / job), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def alone(job, *arguments, timeout_s=120):
    """Run a job in one process, without a launcher."""
    return subprocess.run(
        [sys.executable, str(JOBS / job), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
