"""Forks a process for each job, with what jobs import already imported.

    python tests/support/warm_server.py CHANNEL

CHANNEL is the descriptor of a socket (see `warm.py`). A request is the command, the environment and
the folder in JSON, with three descriptors: a socket, for the process's ID and later its exit code,
and two files, for what the job prints. The server ends when the channel is closed.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import types
from pathlib import Path


def main():
    """Import, serve, and be a job."""
    import torch._dynamo  # which the first optimizer of a process imports

    import evenstep
    import zoo

    assert all((torch.optim, evenstep.Trainer, zoo.build))
    gc.collect()
    gc.freeze()  # else the end of each job looks through all that was imported
    run(*next_job(socket.socket(fileno=int(sys.argv[1]))))


def next_job(channel):
    """Serve; return in the process of each job, and nowhere else, with what it shall be."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the watchers
    while True:
        request, descriptors, *_ = socket.recv_fds(channel, 1 << 20, 3)
        if not request:
            sys.exit()
        answers, *files = descriptors
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            channel.close()
            watch(socket.socket(fileno=answers))
            for descriptor, file in enumerate(files, start=1):
                os.dup2(file, descriptor)
                os.close(file)
            return json.loads(request)
        for descriptor in descriptors:
            os.close(descriptor)


def watch(answers):
    """Fork; return in the new process alone. The other one tells its ID and how it ends.

    A process that nobody waits for any more is killed.
    """
    process = os.fork()
    if process == 0:
        answers.close()
        return
    answers.sendall(process.to_bytes(4, "big"))
    readable, _, _ = select.select([os.pidfd_open(process), answers], [], [])
    if answers in readable:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    with contextlib.suppress(BrokenPipeError):
        answers.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
    os._exit(0)


def run(command, environment, folder):
    """Be a process that was started by `python COMMAND`, a file or -c and a program."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if os.isatty(1):
        sys.stdout, sys.stderr = (os.fdopen(one, "w", 1, "utf-8", closefd=False) for one in (1, 2))
    file, *arguments = command
    program = arguments.pop(0) if file == "-c" else Path(file).read_text()
    sys.argv = [file, *arguments]
    sys.path[0] = "" if file == "-c" else str(Path(file).parent)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    if file != "-c":
        module.__file__ = file
    exec(compile(program, "<string>" if file == "-c" else file, "exec"), module.__dict__)


if __name__ == "__main__":
    main()
