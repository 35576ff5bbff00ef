"""The processes of `evenstep train --processes`, started in the background, and their ports."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

EVENSTEP = [sys.executable, "-m", "evenstep"]


def start(*arguments):
    return subprocess.Popen(
        [*EVENSTEP, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def trains(*options):
    """Start a training, and yield its launcher and its processes as soon as it has trained."""
    launcher = start("train", *options, "--devices", 1)
    try:
        workers = wait_for_workers(launcher, options[options.index("--processes") + 1])
        assert launcher.stdout.readline().startswith("epoch ")
        yield launcher, workers
    finally:
        launcher.terminate()
        launcher.communicate()


def children_of(pid):
    """Return the processes that a process has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in children.split()]


def wait_for_workers(launcher, count):
    """Return the workers of a launcher, once they have started."""
    for _ in range(600):
        workers = children_of(launcher.pid)
        if len(workers) >= count:
            return workers
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.05)
    raise AssertionError("the workers did not start")


def listening_at(pid):
    """Return the local address (hexadecimal) and port of each TCP socket on which it listens."""
    inodes = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:  # LISTEN
                address, port = fields[1].split(":")
                found.append((address, int(port, 16)))
    return found
