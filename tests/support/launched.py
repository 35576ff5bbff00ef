"""Scripts of `tests/support/jobs`, started as a user starts them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

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


def launched(processes, job, *arguments):
    """Run a job as `torchrun` does, by the launcher behind it, without starting torch for that."""
    command = [str(JOBS / job), *map(str, arguments)]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            *(1, 1, processes),
            run_id=Path(folder).name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=Std.ALL),
        )
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"), warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # the launcher closes no log
            code = _code_of(elastic_launch(config, sys.executable), command)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        texts = [
            "".join(file.read_text() for file in sorted(Path(folder).rglob(f"{name}.log")))
            for name in ("stdout", "stderr")
        ]
    return subprocess.CompletedProcess(command, code, *texts)


def _code_of(launch, command):
    try:
        launch(*command)
    except ChildFailedError:
        return 1
    return 0


def alone(job, *arguments, timeout_s=120):
    """Run a job in one process, without a launcher."""
    return subprocess.run(
        [sys.executable, str(JOBS / job), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@contextlib.contextmanager
def started(job, *arguments, variables=({}, {}), within=((), ())):
    """Start a job in several processes without a launcher, which would kill the others at once.

    Args:
        job: a file in `tests/support/jobs`.
        arguments: the job's arguments.
        variables: for each process, what its environment has besides this one's.
        within: for each process, the command that its own follows, such as `unshare -m`.

    Yields:
        the processes, which are killed at the end, and the store in which they meet.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared |= {"WORLD_SIZE": str(len(variables)), "LOCAL_WORLD_SIZE": str(len(variables))}
    shared |= {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    processes = [
        subprocess.Popen(
            [*prefix, sys.executable, str(JOBS / job), *map(str, arguments)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, (prefix, own) in enumerate(zip(within, variables, strict=True))
    ]
    try:
        yield processes, store
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def apart(job, *arguments, timeout_s=120, **differing):
    """Run a job as `started` does; return each process's code and texts."""
    with started(job, *arguments, **differing) as (processes, _):
        ended = [process.communicate(timeout=timeout_s) for process in processes]
        return [(one.returncode, *texts) for one, texts in zip(processes, ended, strict=True)]


def meet():
    """Wait in a job until all of its processes have come so far, however long imports take."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store.set(f"here/{os.environ['RANK']}", "")
    wait_for_all(store, int(os.environ["WORLD_SIZE"]))


def wait_for_all(store, processes=2):
    """Wait until all processes of a job are in `meet`, or behind it."""
    store.wait([f"here/{rank}" for rank in range(processes)])
