"""Lanes: tasks are carried out one at a time a lane, each with its device's number of threads."""

import functools
import threading

import pytest
import torch

from evenstep.devices import Device
from evenstep.engine import Engine, InlineLanes, ThreadLanes

PATIENCE_S = 30  # far more than a right program needs: a wrong one fails instead of hanging

both = pytest.mark.parametrize("make", [ThreadLanes, InlineLanes])


def cpus(*threads):
    return [Device("cpu", index, threads=number) for index, number in enumerate(threads)]


def carried_out(make, devices, puts):
    """Put calls into lanes; return what was called, in order, lane by lane."""
    seen = {lane: [] for lane in range(2 * len(devices))}
    done = threading.Semaphore(0)

    def call(name, function, lane):
        seen[lane].append((name, function(), lanes.here, lanes.inside))
        done.release()

    lanes = make(devices)
    lanes.open()
    for lane, name, function in puts:
        lanes.put(lane, functools.partial(call, name, function))
    lanes.work()
    assert all(done.acquire(timeout=PATIENCE_S) for _ in puts)
    assert not lanes.inside
    lanes.close(set())
    return seen


@both
def test_a_lane_carries_out_its_tasks_in_their_order_and_knows_itself(make):
    puts = [(number % 4, f"{number}", str) for number in range(40)]
    seen = carried_out(make, cpus(1, 1), puts)
    for lane in range(4):
        assert seen[lane] == [(f"{number}", "", lane, True) for number in range(lane, 40, 4)]


def test_lanes_run_at_the_same_time_each_with_its_own_threads():
    barrier = threading.Barrier(3)

    def threads_at_work():
        barrier.wait(PATIENCE_S)  # no lane gets here alone
        before = torch.get_num_threads()
        torch.ones(4, 100_000).sum(1)
        barrier.wait(PATIENCE_S)
        return before, torch.get_num_threads(), threading.current_thread().name

    with Engine(cpus(3, 1, 2)) as engine:
        for _ in range(3):
            handles = [engine.submit(threads_at_work, device=f"cpu:{lane}") for lane in (2, 0, 1)]
            assert [handle.result() for handle in handles] == [
                (2, 2, "evenstep cpu:2"),
                (3, 3, "evenstep cpu:0"),
                (1, 1, "evenstep cpu:1"),
            ]


def test_inline_lanes_run_a_task_before_submit_returns():
    with Engine(cpus(1, 1), lanes=InlineLanes) as engine:
        ran = []
        engine.submit(ran.append, 1)
        assert ran == [1]
