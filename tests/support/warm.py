"""Scripts in processes of their own; most are forked by a server that has imported torch already.

A forked process is what `python SCRIPT` would start, down to how it ends. What libraries read while
they are loaded, such as `ATEN_CPU_CAPABILITY`, has no effect there: give it to a fresh process.
"""

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

SERVER = Path(__file__).parent / "warm_server.py"
CAN_FORK = sys.platform == "linux"


class Job:
    """A process with its output and errors in files, so that it never waits for a reader.

    Args:
        command: what follows `python`: a file, or `-c` and a program, then arguments.
        env: the process's environment; None: this one's.
        rank: ranks 0 and 1 are forked by servers of their own, so that the hash seeds of processes
            that train together differ as those of any two processes do.
        fresh: whether it imports everything itself.
        within: the command that the process's own follows, such as `unshare -m`; then it is fresh.
        shown_on: the descriptor of a terminal, where its output and errors go instead.
    """

    def __init__(self, *command, env=None, rank=0, fresh=False, within=(), shown_on=None):
        words, env = [str(word) for word in command], dict(env or os.environ)
        self._files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
        self._texts = None
        out, err = (file.fileno() if shown_on is None else shown_on for file in self._files)
        if fresh or within or not CAN_FORK:
            words = [*within, sys.executable, *words]
            self._process = subprocess.Popen(words, env=env, stdout=out, stderr=err)
        else:
            self._process = _Forked(words, env, rank, [out, err])

    @property
    def pid(self):
        return self._process.pid

    @property
    def returncode(self):
        return self._process.returncode

    def poll(self):
        return self._process.poll()

    def wait(self, timeout=None):
        return self._process.wait(timeout)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout=None):
        """Wait for the end; return the output and the errors."""
        self.wait(timeout)
        if self._texts is None:
            for file in self._files:
                file.seek(0)
            self._texts = tuple(file.read() for file in self._files)
            for file in self._files:
                file.close()
        return self._texts


def run(*command, timeout_s=120, **options):
    """Run a script to its end, as `subprocess.run` does; for the options see `Job`."""
    job = Job(*command, **options)
    try:
        texts = job.communicate(timeout_s)
    finally:
        job.send_signal(signal.SIGKILL)
    return subprocess.CompletedProcess(command, job.returncode, *texts)


class _Forked:
    """A process that a server has forked; its parent sends its ID and its exit code."""

    def __init__(self, words, env, rank, descriptors):
        self.args, self.returncode = words, None
        self._answers, theirs = socket.socketpair()
        request = json.dumps([words, env, os.getcwd()]).encode()
        with theirs:
            socket.send_fds(_server(rank % 2), [request], [theirs.fileno(), *descriptors])
        self.pid = int.from_bytes(self._answers.recv(4, socket.MSG_WAITALL), "big")

    def wait(self, timeout=None):
        if self.returncode is None:
            self._answers.settimeout(timeout)
            try:
                code = self._answers.recv(4, socket.MSG_WAITALL)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout) from None
            self._answers.close()
            assert len(code) == 4, "the server has died"
            self.returncode = int.from_bytes(code, "big", signed=True)
        return self.returncode

    def poll(self):
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None


@functools.cache
def _server(rank):
    """Start a server, which ends with this process; return the socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = subprocess.Popen(
        [sys.executable, str(SERVER), str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    theirs.close()
    atexit.register(server.wait)
    atexit.register(ours.close)
    return ours
