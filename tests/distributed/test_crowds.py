"""Many processes on one machine: what each holds, and what happens when many of them are killed."""

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from commands import MLP, steps_kept, trained
from crowds import figures
from evenstep.cli.training.record import TrainRecord
from evenstep.distributed.machines.meeting import StoreRounds, machines_of
from evenstep.distributed.secret import SealedStore, meeting_key
from launched import alone, launched
from over_threads import on_each

CROWD, STEPS, EVERY = 16, 300, 20
TRAIN = [*MLP, "--steps", STEPS, "--shards", 32, "--devices", 1]
LIMIT_S = 600


V = 16
HELD = ("sockets", "memory_files", "files", "memory_maps", "threads")


def trained_together(out, processes):
    """Train in so many processes; return what each of them had."""
    folder = out / str(processes)
    folder.mkdir()
    start = functools.partial(launched, processes) if processes > 1 else alone
    finished = start("crowd.py", folder, V, 3)
    assert finished.returncode == 0, finished.stderr
    return figures(folder, processes)


@pytest.mark.parametrize("more", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_on_one_machine_a_process_holds_no_more_because_of_others(more, tmp_path):
    """No connection of each to each: with P processes there would be P (P - 1) sockets."""
    (alone,), few, many = (trained_together(tmp_path, processes) for processes in (1, 4, more))
    assert {one["fingerprint"] for one in [*few, *many]} == {alone["fingerprint"]}
    for one in [*few, *many]:
        assert one["sockets"] == 1  # to the store of the launcher
        assert one["opening"]["messages"] == one["a_step"]["messages"] == 0
        assert [one[kind] for kind in HELD] == [few[0][kind] for kind in HELD]


class CountedStore:
    """A store that counts what is asked of it."""

    def __init__(self, store):
        self._store = store
        self.asked = 0

    def __getattr__(self, name):
        self.asked += 1
        return getattr(self._store, name)


def asked(processes):
    """Return how often each process asks the store until it knows who is on its machine."""
    store = dist.HashStore()
    ends = [CountedStore(store) for _ in range(processes)]

    def meet(end):
        rank = ends.index(end)
        key = meeting_key(end, end, b"", rank, processes, 60.0)
        rounds = StoreRounds(SealedStore(end, key), "meeting", rank, processes, 60.0)
        _, machines = machines_of(rounds, rank)
        assert machines == [range(processes)]
        return end.asked

    return on_each(ends, meet)


def test_to_meet_a_process_asks_the_store_as_often_however_many_there_are():
    assert {*asked(4)} == {*asked(8)} == {*asked(16)}


@functools.cache
def undisturbed():
    return trained(*TRAIN).fingerprint


def torchrun(processes, folder):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    command += ["-m", "evenstep", "train", *TRAIN, "--auto-resume", "--checkpoint-dir", folder]
    command += ["--checkpoint-every", EVERY, "--json", folder / "record.json"]
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def workers_of(launcher):
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text()
    return [int(child) for child in children.split()]


def wait_for(condition, launcher):
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.exhaustive
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize("seed", range(20))
def test_a_third_of_sixteen_processes_is_killed_and_another_number_goes_on(seed, tmp_path):
    """At a random moment: while they start, train or save, or soon after one another."""
    draw = random.Random(seed)
    moment, others = draw.randrange(0, STEPS - 2 * EVERY, EVERY), draw.choice([3, 5, 7, 11, 13])
    launcher = torchrun(CROWD, tmp_path)
    try:
        wait_for(lambda: len(workers_of(launcher)) == CROWD, launcher)
        victims = draw.sample(workers_of(launcher), CROWD // 3)
        wait_for(lambda: max(steps_kept(tmp_path), default=0) >= moment, launcher)
        for victim in victims:
            time.sleep(draw.random() * draw.choice([0.01, 1.0]))
            with contextlib.suppress(ProcessLookupError):  # the launcher has ended the others
                os.kill(victim, signal.SIGKILL)
        launcher.communicate(timeout=LIMIT_S)
        assert launcher.returncode, "no process was missed"
        launcher = torchrun(others, tmp_path)
        _, errors = launcher.communicate(timeout=LIMIT_S)
    finally:
        launcher.kill()
        launcher.communicate()
    assert launcher.returncode == 0, errors
    record = TrainRecord.from_json((tmp_path / "record.json").read_text())
    assert record.fingerprint == undisturbed()
