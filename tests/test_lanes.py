"""Lanes: fork and join over devices, with and without threads, whatever happens in between."""

import os
import signal
import subprocess
import sys
import threading
import traceback
import weakref

import pytest
import torch

from evenstep.devices import Device
from evenstep.engine.forkjoin import InlineLanes, Task, ThreadLanes
from evenstep.errors import ClosedError

PATIENCE_S = 30  # far more than a right program needs: a wrong one fails instead of hanging

both = pytest.mark.parametrize("make", [ThreadLanes, InlineLanes])


def cpus(*threads):
    return [Device("cpu", index, threads=number) for index, number in enumerate(threads)]


def wait(*events):
    for event in events:
        assert event.wait(PATIENCE_S)


def meet(barrier):
    barrier.wait(PATIENCE_S)


# ---- what both kinds of lanes do


@both
def test_results_come_in_the_order_of_the_tasks(make):
    with make(cpus(1, 1, 1)) as lanes:
        tasks = [Task(number % 3, divmod, (number, 7)) for number in (5, 40, 3, 22, 16, 7, 1)]
        assert lanes.run(tasks) == [divmod(task.arguments[0], 7) for task in tasks]
        assert lanes.run([Task(2, lambda: "alone")]) == ["alone"]
        assert lanes.run([]) == []


@both
def test_tasks_of_one_lane_run_in_their_order(make):
    with make(cpus(1, 1)) as lanes:
        seen = {0: [], 1: []}
        lanes.run([Task(n % 2, seen[n % 2].append, (n,)) for n in range(200)])
        assert seen == {0: list(range(0, 200, 2)), 1: list(range(1, 200, 2))}


@both
@pytest.mark.parametrize("callers", [1, 2, 5])
def test_a_lane_has_its_devices_threads_whatever_the_caller_has(make, callers):
    torch.set_num_threads(callers)
    with make(cpus(1, 2, 3)) as lanes:
        tasks = [Task(lane, torch.get_num_threads) for lane in (0, 1, 2, 0)]
        assert lanes.run(tasks) == [1, 2, 3, 1]
        assert torch.get_num_threads() == callers
        torch.set_num_threads(callers + 1)  # the caller changes their mind
        assert lanes.run(tasks) == [1, 2, 3, 1]
        assert torch.get_num_threads() == callers + 1


def divide_by_zero():
    return 1 // 0


@both
def test_an_error_brings_the_traceback_of_its_task(make):
    with make(cpus(1, 1)) as lanes:
        with pytest.raises(ZeroDivisionError) as caught:
            lanes.run([Task(0, str), Task(1, divide_by_zero)])
        places = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert places[-1] == "divide_by_zero"


@both
def test_after_an_error_what_has_not_begun_is_dropped(make):
    begun = []
    with make(cpus(1)) as lanes:
        tasks = [Task(0, begun.append, (0,)), Task(0, divide_by_zero), Task(0, begun.append, (2,))]
        with pytest.raises(ZeroDivisionError):
            lanes.run(tasks)
        assert begun == [0]
        assert lanes.run(tasks[2:]) == [None]  # the lanes go on
        assert begun == [0, 2]


class Stop(BaseException):
    """Neither an Exception nor one that Python knows, as pytest's own are."""


@both
@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt, SystemExit])
def test_errors_that_are_no_exceptions_come_through_too(make, kind):
    def stop():
        raise kind

    with make(cpus(1)) as lanes:
        with pytest.raises(kind):
            lanes.run([Task(0, stop)])
        assert lanes.run([Task(0, int)]) == [0]


@both
def test_the_callers_threads_come_back_after_an_error(make):
    torch.set_num_threads(2)
    with make(cpus(3)) as lanes:
        with pytest.raises(ZeroDivisionError):
            lanes.run([Task(0, divide_by_zero)])
        assert torch.get_num_threads() == 2


@both
@pytest.mark.parametrize("lane", [0, 1])
def test_busy_seconds_grow_with_the_work_of_the_lane(make, lane):
    weights = torch.rand(300, 300)
    with make(cpus(1, 1)) as lanes:
        assert list(lanes.busy_s) == [0.0, 0.0]
        for _ in range(3):
            before = lanes.busy_s[lane]
            lanes.run([Task(lane, torch.matmul, (weights, weights))])
            lanes.run([Task(lane, int)])  # once it has begun, the one before it has been counted
            assert lanes.busy_s[lane] > before
        assert lanes.busy_s[1 - lane] == 0.0


@both
def test_an_idle_lane_keeps_nothing_of_a_finished_task(make):
    with make(cpus(1)) as lanes:
        argument = torch.rand(3)
        result = lanes.run([Task(0, torch.neg, (argument,))])[0]
        freed = [threading.Event(), threading.Event()]
        for tensor, event in zip((argument, result), freed, strict=True):
            weakref.finalize(tensor, event.set)
        del tensor, argument, result
        wait(*freed)


# ---- what only threads do


def test_lanes_run_at_the_same_time_each_with_its_own_threads():
    barrier = threading.Barrier(3)

    def threads_at_work():
        meet(barrier)  # no lane gets here alone
        before = torch.get_num_threads()
        torch.ones(4, 100_000).sum(1)
        meet(barrier)
        return before, torch.get_num_threads(), threading.current_thread().name

    with ThreadLanes(cpus(3, 1, 2)) as lanes:
        for _ in range(3):
            results = lanes.run([Task(lane, threads_at_work) for lane in (2, 0, 1)])
            assert results == [
                (2, 2, "evenstep cpu:2"),
                (3, 3, "evenstep cpu:0"),
                (1, 1, "evenstep cpu:1"),
            ]


def test_a_callers_number_that_was_never_set_stays():
    """In a fresh process: torch settles a thread's number at its first use of torch."""
    script = """
import torch
from evenstep.devices import Device
from evenstep.engine.forkjoin import Task, ThreadLanes
with ThreadLanes([Device("cpu", 0, threads=3)]) as lanes:
    assert lanes.run([Task(0, torch.get_num_threads)]) == [3]
print(torch.get_num_threads())
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "2\n"


def test_the_first_error_in_the_order_of_tasks_is_raised():
    second_failed = threading.Event()

    def fail_late():
        wait(second_failed)
        raise LookupError("first in order, second in time")

    def fail_soon():
        try:
            raise OSError("second in order, first in time")
        finally:
            second_failed.set()

    started = threading.Barrier(2)
    with ThreadLanes(cpus(1, 1)) as lanes, pytest.raises(LookupError):
        lanes.run(
            [
                Task(0, lambda: (meet(started), fail_late())),
                Task(1, lambda: (meet(started), fail_soon())),
            ]
        )


def test_after_an_error_nothing_is_still_at_work():
    at_work = []
    started = threading.Barrier(2)

    def work():
        at_work.append("work")
        meet(started)
        threading.Event().wait(0.05)  # an error that did not wait would overtake this
        at_work.remove("work")

    with ThreadLanes(cpus(1, 1)) as lanes:
        with pytest.raises(ZeroDivisionError):
            lanes.run([Task(0, work), Task(1, lambda: (meet(started), divide_by_zero()))])
        assert at_work == []


class WatchedLanes(ThreadLanes):
    """Lanes that tell when an interrupted `run` has begun to wait for what is still at work."""

    def __init__(self, devices):
        super().__init__(devices)
        self.draining = threading.Event()

    def _drain(self):
        self.draining.set()
        super()._drain()


@pytest.fixture
def press_ctrl_c():
    """Return a function that interrupts the main thread once, as a terminal does, where it waits.

    A signal that comes just before a thread falls asleep does not wake it, so it is sent until it
    is noticed.
    """
    pressed = []

    def on_signal(number, frame):
        asleep = frame.f_code is threading.Condition.wait.__code__
        if pressed and asleep and frame.f_locals.get("gotit") is False:
            pressed.clear()
            raise KeyboardInterrupt

    def press():
        pressed.append("^C")
        for _ in range(PATIENCE_S * 1000):
            if not pressed:
                return
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            threading.Event().wait(0.001)
        raise AssertionError("nobody noticed Ctrl-C")

    before = signal.signal(signal.SIGINT, on_signal)
    yield press
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("presses", [1, 2, 4])
def test_ctrl_c_ends_what_runs_and_drops_the_rest(press_ctrl_c, presses):
    """However often it is pressed, `run` does not return while a task is at work."""
    seen = []
    begun = threading.Barrier(2)
    with WatchedLanes(cpus(1, 1)) as lanes:

        def work(lane):
            meet(begun)
            for _ in range(presses if lane == 0 else 0):
                press_ctrl_c()
            wait(lanes.draining)
            threading.Event().wait(0.02)  # an interrupt that did not wait would overtake this
            seen.append(f"ended {lane}")

        with pytest.raises(KeyboardInterrupt):
            lanes.run(
                [
                    Task(0, work, (0,)),
                    Task(1, work, (1,)),
                    Task(0, seen.append, ("never",)),
                    Task(1, seen.append, ("never",)),
                ]
            )
        assert sorted(seen) == ["ended 0", "ended 1"]
        assert lanes.run([Task(0, int), Task(1, str)]) == [0, ""]  # the lanes go on
        assert len(seen) == 2


def test_lanes_that_are_not_open_refuse_tasks():
    lanes = ThreadLanes(cpus(1))
    line = "the lanes are not open: use them inside `with`"
    with pytest.raises(ClosedError) as before:
        lanes.run([Task(0, int)])
    with lanes:
        assert lanes.run([Task(0, int)]) == [0]
    with pytest.raises(ClosedError) as after:
        lanes.run([Task(0, int)])
    assert str(before.value) == str(after.value) == line
    with lanes:  # opened again
        assert lanes.run([Task(0, int)]) == [0]


def lane_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("evenstep")]


def test_no_thread_runs_outside_with():
    lanes = ThreadLanes(cpus(1, 1, 1))
    assert lane_threads() == []
    with lanes:
        assert len(lane_threads()) == 3
    assert lane_threads() == []
    with pytest.raises(ZeroDivisionError), lanes:
        divide_by_zero()
    assert lane_threads() == []
    with pytest.raises(ZeroDivisionError), lanes:
        lanes.run([Task(1, divide_by_zero)])
    assert lane_threads() == []


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts as Linux does")
def test_two_hundred_openings_leak_nothing():
    numbers = torch.ones(4, 100_000)

    def open_once():
        with ThreadLanes(cpus(2, 1)) as lanes:
            lanes.run([Task(lane, numbers.sum, (1,)) for lane in (0, 1)])

    def count_of(kind):
        return len(os.listdir(f"/proc/self/{kind}"))

    open_once()
    threads, os_threads, files = threading.active_count(), count_of("task"), count_of("fd")
    for _ in range(200):
        open_once()
    assert threading.active_count() == threads
    assert count_of("fd") == files
    assert count_of("task") < os_threads + 100  # one that has just been joined may still show
