"""Scripts of `tests/support/jobs`, started as a user starts them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

from warm import Job, run

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


def launched(processes, job, *arguments, **variables):
    """Run a job as `torchrun` does: an error of one process ends the others.

    With more variables of the environment, the processes are fresh ones.
    """
    given = [variables] * processes
    with started(job, *arguments, variables=given, within=[()] * processes) as (jobs, _):
        while not all(one.poll() == 0 for one in jobs):
            if any(one.poll() for one in jobs):
                for one in jobs:
                    one.send_signal(signal.SIGTERM)
                break
            time.sleep(0.02)
        texts = [one.communicate(timeout=60) for one in jobs]
    output, errors = ("".join(parts) for parts in zip(*texts, strict=True))
    code = int(any(one.returncode for one in jobs))
    return subprocess.CompletedProcess((job, *arguments), code, output, errors)


def alone(job, *arguments, **options):
    """Run a job in one process, without a launcher; for the options see `warm.run`."""
    return run(JOBS / job, *arguments, **options)


@contextlib.contextmanager
def started(job, *arguments, variables=({}, {}), within=((), ())):
    """Start a job in several processes without a launcher, which would kill the others at once.

    Args:
        job: a file in `tests/support/jobs`.
        arguments: the job's arguments.
        variables: for each process, what its environment has besides this one's; a process that
            is given some is a fresh one.
        within: for each process, the command that its own follows, such as `unshare -m`.

    Yields:
        the processes, which are killed at the end, and the store in which they meet.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": str(len(variables)), "LOCAL_WORLD_SIZE": str(len(variables))}
    shared |= {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with contextlib.ExitStack() as stack:
        jobs = []
        for rank, (prefix, own) in enumerate(zip(within, variables, strict=True)):
            env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **own}
            options = {"env": env, "rank": rank, "fresh": bool(own), "within": prefix}
            jobs.append(Job(JOBS / job, *arguments, **options))
            stack.callback(jobs[-1].communicate)
            stack.callback(jobs[-1].send_signal, signal.SIGKILL)
        yield jobs, store


def apart(job, *arguments, timeout_s=120, **differing):
    """Run a job as `started` does; return each process's code and texts."""
    with started(job, *arguments, **differing) as (jobs, _):
        ended = [one.communicate(timeout=timeout_s) for one in jobs]
        return [(one.returncode, *texts) for one, texts in zip(jobs, ended, strict=True)]


def meet():
    """Wait in a job until all of its processes have come so far, however long imports take."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store.set(f"here/{os.environ['RANK']}", "")
    wait_for_all(store, int(os.environ["WORLD_SIZE"]))


def wait_for_all(store, processes=2):
    """Wait until all processes of a job are in `meet`, or behind it."""
    store.wait([f"here/{rank}" for rank in range(processes)])
