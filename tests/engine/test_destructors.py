"""Destructors of what tasks were given and returned: they may call the engine."""

import gc
import threading
import weakref

import pytest

from evenstep.engine import Engine, InlineLanes, Task, ThreadLanes
from evenstep.errors import DeadlockError
from evenstep.profiling.trace import Span, Trace
from layouts import TWO
from patience import HUNG_TESTS_ABORT, wait, wait_until

pytestmark = HUNG_TESTS_ABORT

both = pytest.mark.parametrize("lanes", [ThreadLanes, InlineLanes])


class Watched:
    """Calls a function when it is destroyed."""

    def __init__(self, at_end):
        self._at_end = at_end

    def __del__(self):
        self._at_end()


class Calls:
    """What destructors do: each gives the engine a task."""

    def __init__(self, engine):
        self.handles = []
        self._engine = engine

    def __call__(self, *ignored):
        self.handles.append(self._engine.submit(int))

    def expect(self, count):
        wait_until(lambda: len(self.handles) == count)
        assert [handle.result() for handle in self.handles] == [0] * count


def ignore(*arguments):
    """Return nothing of what it was given."""


def fail(*arguments):
    raise ZeroDivisionError


def test_an_argument_is_destroyed_when_its_task_ends(engine):
    calls = Calls(engine)
    engine.submit(ignore, Watched(calls)).result()
    calls.expect(1)


def test_a_function_is_destroyed_when_its_task_ends(engine):
    calls = Calls(engine)

    class Function(Watched):
        def __call__(self):
            return 3

    assert engine.submit(Function(calls)).result() == 3
    calls.expect(1)


def test_a_weak_reference_is_called_when_a_task_ends(engine):
    calls = Calls(engine)

    class Plain:
        pass

    argument = Plain()
    keep = weakref.ref(argument, calls)
    handle = engine.submit(ignore, argument)
    del argument
    handle.result()
    calls.expect(1)
    assert keep() is None


def test_a_result_that_nobody_holds_is_destroyed(engine):
    calls = Calls(engine)
    engine.submit(lambda: Watched(calls))
    calls.expect(1)


def test_a_task_that_cannot_run_destroys_its_arguments(engine):
    """In the thread that submits it, where a destructor may also wait."""
    calls, waited = Calls(engine), []

    def wait_for_more():
        calls()
        waited.append(engine.submit(int).result())

    failed = engine.submit(fail)
    with pytest.raises(ZeroDivisionError):
        failed.result()
    with pytest.raises(ZeroDivisionError):
        engine.submit(ignore, failed, Watched(wait_for_more)).result()
    calls.expect(1)
    assert waited == [0]


def test_what_waits_for_a_failed_task_destroys_its_arguments(engine):
    calls = Calls(engine)
    gate = threading.Event()
    if engine.side_by_side:
        failing = engine.submit(lambda: (wait(gate), fail()))
    else:
        failing = engine.submit(fail)
    last = engine.submit(ignore, engine.submit(ignore, failing, Watched(calls)), Watched(calls))
    gate.set()
    with pytest.raises(ZeroDivisionError):
        last.result()
    calls.expect(2)


def test_a_device_that_is_lost_destroys_what_its_tasks_were_given():
    with Engine(TWO) as engine:
        calls, gate = Calls(engine), threading.Event()
        engine.submit_tasks([Task(wait, (gate,), lane=1, quiet=True)])
        tasks = [
            Task(ignore, (Watched(calls),), lane=1, quiet=True),
            Task(ignore, (Watched(calls),), lane=3, quiet=True, reads=[engine.Var(0)]),
        ]
        engine.submit_tasks(tasks)
        engine.lose(1)
        gate.set()
        del tasks
        calls.expect(2)


# ---- what the garbage collector destroys in the middle of the engine's work


def garbage(at_end):
    """Leave something that only the garbage collector destroys."""
    one = Watched(at_end)
    one.itself = one


@both
@pytest.mark.parametrize("event", ["submit", "ended", "lose"])
@pytest.mark.thinned(2)
def test_the_collector_may_run_in_the_middle_of_a_change(lanes, event, monkeypatch):
    with Engine(TWO, lanes=lanes) as engine:
        calls = Calls(engine)
        original = getattr(engine.scheduler, event)

        def with_garbage(*arguments, **options):
            monkeypatch.undo()
            garbage(calls)
            gc.collect()
            assert len(calls.handles) == 1
            return original(*arguments, **options)

        monkeypatch.setattr(engine.scheduler, event, with_garbage)
        handle = engine.submit(int, device="cpu:0")
        if event == "lose":
            engine.lose(1)
        assert handle.result() == 0
        calls.expect(1)
        assert engine.scheduler.graph.unfinished == 0


def test_a_destructor_that_waits_in_the_middle_of_a_change_is_refused(engine, monkeypatch):
    """It would wait for itself."""
    original, errors = engine.scheduler.submit, []

    def wait_for_more():
        for waiting in (engine.submit(int).result, engine.waitall, engine.close):
            with pytest.raises(DeadlockError, match="a destructor or a signal handler can't") as e:
                waiting()
            errors.append(e.value)

    def with_garbage(*arguments):
        monkeypatch.undo()
        garbage(wait_for_more)
        gc.collect()
        return original(*arguments)

    monkeypatch.setattr(engine.scheduler, "submit", with_garbage)
    assert engine.submit(int).result() == 0
    assert len(errors) == 3
    engine.waitall()


# ---- the trace, which keeps the stories of tasks


def test_a_story_is_destroyed_when_the_trace_is_full(monkeypatch):
    with Engine(TWO) as engine:
        monkeypatch.setattr(engine.trace, "_limit", 1)
        calls = Calls(engine)
        engine.submit(int, story={"who": Watched(calls)}).result()
        engine.submit(int).result()
        calls.expect(1)


def test_a_destructor_may_read_the_trace():
    trace, read = Trace(["cpu:0"], limit=1), []

    class Reading(list):
        def popleft(self):
            read.append(len(trace.spans))
            return self.pop(0)

    trace._others = Reading()
    for number in range(3):
        trace.add(Span(0, str(number), "compute", 0.0, 0.0, {"who": object()}))
    assert read == [2, 2]
