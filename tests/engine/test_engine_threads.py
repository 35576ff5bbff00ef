"""The engine's threads: what runs beside what, bounds, lost devices, and that nothing is left."""

import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch

from evenstep.devices import Device
from evenstep.engine import Engine, InlineLanes, Task, ThreadLanes
from evenstep.errors import DeviceLostError
from layouts import TWO
from patience import HUNG_TESTS_ABORT, meet, wait, wait_until

pytestmark = HUNG_TESTS_ABORT


# ---- beside each other


def test_submission_never_blocks():
    gate = threading.Event()
    with Engine(1) as engine:
        handles = [engine.submit(wait, gate)]
        x = engine.Var([])
        handles += [engine.submit(list.append, x, n, writes=[x]) for n in range(2000)]
        copy = engine.copy(x, "cpu:0")
        assert not any(handle.done for handle in handles)
        gate.set()
        assert copy.result() == list(range(2000))


def test_lanes_compute_at_the_same_time():
    met = threading.Barrier(3)
    with Engine(3) as engine:
        for device in engine.devices:
            engine.submit(meet, met, device=device)
        for _ in range(3):
            engine.submit(meet, met)  # on any free lane


def test_a_copy_runs_beside_computation_on_the_same_device():
    arrived = threading.Event()
    with Engine(TWO) as engine:
        computing = engine.submit(wait, arrived, device="cpu:0")
        copy = engine.copy(torch.ones(2), "cpu:0")
        engine.submit(lambda _: arrived.set(), copy, device="cpu:1")
        computing.result()


def test_a_copy_and_a_computation_may_meet():
    met = threading.Barrier(2)

    class Meets:
        def __reduce__(self):
            raise AssertionError("copied as it is")

    with Engine(1) as engine:
        engine.submit_tasks(
            [Task(meet, (met,), lane=0), Task(meet, (met,), lane=engine.copy_lane(0))]
        )
        assert isinstance(engine.copy(Meets(), "cpu:0").result(), Meets)


# ---- max_in_flight


@pytest.mark.parametrize("bound", [1, 2, 7])
def test_the_front_end_waits_at_the_bound_exactly(bound):
    most = []
    reached = threading.Event()

    def first():
        wait_until(lambda: engine.scheduler.graph.unfinished == bound)
        reached.set()
        threading.Event().wait(0.02)  # a front end that does not wait would overrun it

    def look():
        most.append(engine.scheduler.graph.unfinished)

    with Engine(1, max_in_flight=bound) as engine:
        engine.submit(first)
        for _ in range(bound - 1):
            assert not reached.is_set() or bound == 1
            engine.submit(look)  # at once: below the bound
        for _ in range(50):
            engine.submit(look)
        engine.waitall()
    assert max(most) <= bound


class Counted:
    """Something that takes memory; knows how many of its kind live."""

    alive = 0
    most = 0
    lock = threading.Lock()

    def __init__(self, *ignored):
        with Counted.lock:
            Counted.alive += 1
            Counted.most = max(Counted.most, Counted.alive)

    def __del__(self):
        with Counted.lock:
            Counted.alive -= 1


@pytest.mark.parametrize("lanes", [ThreadLanes, InlineLanes])
def test_memory_stays_bounded(lanes):
    Counted.alive = Counted.most = 0
    with Engine(TWO, max_in_flight=4, lanes=lanes) as engine:
        last = engine.submit(Counted)
        for _ in range(300):
            last = engine.submit(Counted, last, Counted())
        assert isinstance(last.result(), Counted)
        del last
    # For each of four tasks an argument and a result, for each lane one in hand, and the front
    # end's.
    assert Counted.most <= 2 * 4 + 4 + 2
    assert Counted.alive == 0


@pytest.mark.parametrize("lanes", [ThreadLanes, InlineLanes])
def test_an_idle_lane_keeps_nothing_of_a_finished_task(lanes):
    with Engine(1, lanes=lanes) as engine:
        argument = torch.rand(3)
        x = engine.Var(torch.rand(3))
        result = engine.submit(torch.add, argument, x, reads=[x]).result()
        freed = [threading.Event() for _ in range(3)]
        for tensor, event in zip((argument, x.result(), result), freed, strict=True):
            weakref.finalize(tensor, event.set)
        del tensor, argument, result, x
        wait(*freed)


@pytest.mark.parametrize("lanes", [ThreadLanes, InlineLanes])
def test_a_handle_keeps_its_result_and_nothing_that_its_task_was_given(lanes):
    with Engine(1, lanes=lanes) as engine:
        argument, x = torch.rand(3), engine.Var(torch.rand(3))
        freed = [threading.Event() for _ in range(2)]
        for tensor, event in zip((argument, x.result()), freed, strict=True):
            weakref.finalize(tensor, event.set)
        handle = engine.submit(len, argument, reads=[x])
        engine.submit(len, [1], writes=[x])
        engine.waitall()
        del tensor, argument, x
        wait(*freed)
        assert handle.result() == 3


# ---- lost devices


def test_a_lost_device_fails_its_tasks_and_nobody_waits_for_it():
    begun, release = threading.Event(), threading.Event()
    ran = []

    def work():
        begun.set()
        wait(release)

    try:
        with Engine(TWO) as engine:
            x = engine.Var([])
            stuck = engine.submit(work, device="cpu:0", name="stuck", story={"step": 3}, writes=[x])
            bound = engine.submit(ran.append, 1, device="cpu:0")
            needs = engine.submit(str, stuck, device="cpu:1")
            copy = engine.copy(torch.ones(1), "cpu:0")
            copy.result()
            wait(begun)
            engine.lose(0)
            for handle, name in (
                (stuck, "stuck"),
                (bound, "append"),
                (needs, "stuck"),
                (x, "stuck"),
            ):
                with pytest.raises(DeviceLostError, match=f"cpu:0 was lost, and '{name}' with it"):
                    handle.result()
            with pytest.raises(DeviceLostError) as caught:
                stuck.result()
            assert caught.value.__notes__ == [
                "in task 'stuck' (number 0) on cpu:0; step 3; writes Var 1"
            ]
            assert engine.submit(int).result() == 0
            for submit in (
                lambda: engine.submit(int, device="cpu:0"),
                lambda: engine.copy(1, "cpu:0"),
            ):
                with pytest.raises(DeviceLostError):
                    submit().result()
            assert ran == []
        lane = next(t for t in threading.enumerate() if t.name == "evenstep cpu:0")
    finally:
        release.set()
    lane.join()
    with pytest.raises(DeviceLostError):  # that the task ended after all changes nothing
        stuck.result()


@pytest.mark.parametrize("ending", ["returns", "raises"])
def test_a_task_of_a_lost_device_that_ends_late_changes_nothing(ending):
    begun, release = threading.Event(), threading.Event()

    def late():
        begun.set()
        wait(release)
        if ending == "raises":
            raise LookupError("too late")
        return "too late"

    with Engine(TWO) as engine:
        stuck = engine.submit(late, device="cpu:0")
        wait(begun)
        engine.lose(0)
        with pytest.raises(DeviceLostError):
            stuck.result()
        release.set()
        wait_until(lambda: any(span.name == stuck.task.name for span in engine.trace.spans))
        with pytest.raises(DeviceLostError):
            stuck.result()
        assert stuck.task.result is None
        assert engine.submit(int).result() == 0


@pytest.mark.parametrize("lanes", [ThreadLanes, InlineLanes])
def test_without_any_device_left_tasks_fail_and_nothing_hangs(lanes):
    with Engine(TWO, lanes=lanes) as engine:
        before = engine.submit(int)
        before.wait_to_read()
        engine.lose(1)
        assert engine.submit(int).result() == 0
        engine.lose(0)
        for where in ({}, {"device": "cpu:0"}):
            with pytest.raises(DeviceLostError):
                engine.submit(int, **where).result()
        assert before.result() == 0


def test_what_nobody_waited_for_on_a_lost_device_is_raised_at_the_end():
    begun, release = threading.Event(), threading.Event()
    try:
        engine = Engine(TWO)
        engine.__enter__()
        engine.submit(lambda: (begun.set(), wait(release)), device="cpu:1")
        wait(begun)
        engine.lose(1)
        with pytest.raises(DeviceLostError, match="cpu:1 was lost"):
            engine.close()
        lane = next(t for t in threading.enumerate() if t.name == "evenstep cpu:1")
    finally:
        release.set()
    lane.join()


# ---- nothing is left


def lane_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("evenstep")]


def test_no_thread_runs_outside_with():
    engine = Engine(3)
    assert lane_threads() == []
    with engine:
        engine.waitall()
        names = [str(device) for device in engine.devices]
        wait_until(lambda: len(lane_threads()) == 6)
        assert sorted(thread.name for thread in lane_threads()) == sorted(
            [f"evenstep {name}" for name in names] + [f"evenstep copy {name}" for name in names]
        )
    assert lane_threads() == []
    with pytest.raises(ZeroDivisionError), engine:
        raise ZeroDivisionError
    assert lane_threads() == []
    with pytest.raises(ZeroDivisionError), engine:
        engine.submit(divmod, 1, 0)
    assert lane_threads() == []


def test_a_callers_number_of_threads_that_was_never_set_stays():
    """In a fresh process: torch settles a thread's number at its first use of torch."""
    script = """
import torch
from evenstep.devices import Device
from evenstep.engine import Engine
with Engine([Device("cpu", 0, threads=3)]) as engine:
    assert engine.submit(torch.get_num_threads).result() == 3
print(torch.get_num_threads())
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "2\n"


def open_once():
    numbers = torch.ones(4, 1000)
    devices = [Device("cpu", 0, threads=2), Device("cpu", 1)]
    with Engine(devices, max_in_flight=3) as engine:
        x = engine.Var([])
        for device in devices:
            total = engine.submit(numbers.sum, 1, device=device)
            engine.submit(lambda value, t: value.append(t), x, total, writes=[x])
        failed = engine.submit(divmod, 1, 0)
        assert len(engine.copy(x, "cpu:0").result()) == 2
        with pytest.raises(ZeroDivisionError):
            failed.result()


def count_of(kind):
    return len(os.listdir(f"/proc/self/{kind}"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts as Linux does")
def test_hundreds_of_engines_leak_no_thread_and_no_descriptor():
    open_once()
    threads, os_threads, files = threading.active_count(), count_of("task"), count_of("fd")
    for _ in range(200):
        open_once()
    assert threading.active_count() == threads
    assert count_of("fd") == files
    wait_until(lambda: count_of("task") <= os_threads + 2)  # one just joined may still show
