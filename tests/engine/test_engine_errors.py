"""Errors of tasks: their messages, the tasks that they reach, and that none is lost."""

import gc
import logging
import signal
import threading
import traceback
import weakref

import pytest
import torch

from evenstep.engine import Engine, InlineLanes, Task, ThreadLanes
from evenstep.errors import ClosedError, DeadlockError, InputError
from layouts import TWO
from patience import HUNG_TESTS_ABORT, meet, wait

pytestmark = HUNG_TESTS_ABORT


both = pytest.mark.parametrize("lanes", [ThreadLanes, InlineLanes])


def divide_by_zero(*ignored):
    return 1 // 0


def fail(error):
    raise error


def functions_in(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


# ---- what an error says


def test_an_error_has_the_tasks_own_traceback(engine):
    with pytest.raises(ZeroDivisionError) as caught:
        engine.submit(divide_by_zero).result()
    assert functions_in(caught.value)[-1] == "divide_by_zero"


def test_an_error_prints_the_tasks_story(engine):
    one, x, y = engine.submit(int, name="one"), engine.Var(0, "x"), engine.Var(0, "y")
    handle = engine.submit(
        divide_by_zero,
        [one, y],
        device="cpu:1",
        reads=[x],
        writes=[engine.Var(0, "z")],
        name="divide",
        story={"step": 12, "after": one},
    )
    with pytest.raises(ZeroDivisionError) as caught:
        handle.result()
    assert caught.value.__notes__ == [
        "in task 'divide' (number 1) on cpu:1; step 12; after the result of 'one' (number 0); "
        "takes the result of 'one' (number 0); reads y, x; writes z"
    ]


def test_raised_twice_an_error_is_the_same_and_does_not_grow(engine):
    handle = engine.submit(divide_by_zero)
    dependant = engine.submit(str, handle)
    seen = []
    for waiting in (handle, handle, dependant, handle):
        with pytest.raises(ZeroDivisionError) as caught:
            waiting.result()
        seen.append((caught.value, functions_in(caught.value), list(caught.value.__notes__)))
    error, functions, notes = seen[0]
    for other, others_functions, others_notes in seen[1:]:
        assert other is error
        assert len(others_functions) == len(functions)
        assert others_notes == notes


class Unprintable:
    def __str__(self):
        raise LookupError("no name")


def test_a_story_that_cannot_be_printed_stops_no_lane(engine):
    with pytest.raises(ZeroDivisionError) as caught:
        engine.submit(divide_by_zero, story={"who": Unprintable()}, device="cpu:0").result()
    (note,) = caught.value.__notes__
    assert note.startswith(
        "in task 'divide_by_zero' on cpu:0; its story can't be printed: LookupErr"
    )
    assert engine.submit(int, device="cpu:0").result() == 0


class Stop(BaseException):
    """Neither an Exception nor one that Python knows, as pytest's own are."""


@pytest.mark.parametrize("kind", [Stop, KeyboardInterrupt, SystemExit, StopIteration])
def test_errors_of_every_kind_come_through(engine, kind):
    handle = engine.submit(fail, kind())
    with pytest.raises(kind):
        handle.result()
    assert engine.submit(int).result() == 0


# ---- which tasks fail with it


def test_dependants_are_poisoned_and_not_run(engine):
    ran = []
    failed = engine.submit(divide_by_zero)
    x = engine.Var([])
    writer = engine.submit(ran.append, failed, writes=[x])
    reader = engine.submit(ran.append, x)
    deep = engine.submit(ran.append, [{"deep": reader}])
    for waiting in (deep, reader, writer, x, failed):
        with pytest.raises(ZeroDivisionError):
            waiting.result()
    assert ran == []


def test_a_failed_writer_leaves_the_var_undefined_and_a_new_one_is_a_fresh_start(engine):
    x = engine.Var([])
    engine.submit(divide_by_zero, writes=[x])
    with pytest.raises(ZeroDivisionError):
        x.result()
    with pytest.raises(ZeroDivisionError):
        engine.submit(list.append, x, 1, writes=[x]).result()
    with pytest.raises(ZeroDivisionError):
        x.result()
    x = engine.Var([])
    engine.submit(list.append, x, 1, writes=[x])
    assert x.result() == [1]


def test_an_argument_that_cannot_be_passed_is_the_tasks_error(engine):
    with pytest.raises(TypeError, match="argument"):
        engine.submit(divmod, 1).result()


# ---- that none is lost


@both
@pytest.mark.parametrize("how", ["close", "waitall"])
def test_an_error_that_nobody_waited_for_is_raised_at_the_end(lanes, how):
    engine = Engine(1, lanes=lanes)

    def use():
        with engine:
            engine.submit(int)
            engine.submit(divide_by_zero)
            if how == "waitall":
                engine.waitall()
                raise AssertionError("waitall raised nothing")

    with pytest.raises(ZeroDivisionError) as caught:
        use()
    assert functions_in(caught.value)[-1] == "divide_by_zero"
    engine.close()  # once is enough


@both
def test_of_several_unseen_errors_the_first_is_raised_and_the_others_noted(lanes):
    engine = Engine(1, lanes=lanes)
    engine.__enter__()
    for error in (LookupError("first"), OSError("second"), OSError("third")):
        engine.submit(fail, error)
    with pytest.raises(LookupError) as caught:
        engine.close()
    assert caught.value.__notes__[-1] == "2 more failed: OSError('second'), ..."


def test_after_waitall_has_raised_the_engine_goes_on(engine):
    engine.submit(divide_by_zero)
    engine.submit(divide_by_zero)
    with pytest.raises(ZeroDivisionError):
        engine.waitall()
    assert engine.submit(int).result() == 0
    engine.waitall()


def test_an_error_that_was_seen_is_not_raised_again_at_the_end(engine):
    handles = [engine.submit(divide_by_zero) for _ in range(3)]
    x = engine.Var(0)
    engine.submit(divide_by_zero, writes=[x])
    waiting = [handles[0], engine.submit(str, handles[1]), engine.submit(str, handles[2]), x]
    for handle in waiting:
        with pytest.raises(ZeroDivisionError):
            handle.result()


def test_a_quiet_tasks_error_is_its_submitters_affair(engine):
    task = Task(divide_by_zero, quiet=True)
    engine.submit_tasks([task])
    engine.waitall()
    assert isinstance(engine.failure_of(task), ZeroDivisionError)
    assert engine.failure_of(engine.submit(int).task) is None


@both
def test_an_error_of_the_user_wins_over_those_of_tasks(lanes, caplog):
    def use():
        with Engine(1, lanes=lanes) as engine:
            with pytest.raises(OSError, match="seen"):
                engine.submit(fail, OSError("seen")).result()
            engine.submit(divide_by_zero)
            engine.wait_for(engine.submit(int).task)
            raise LookupError("mine")

    with caplog.at_level(logging.ERROR, "evenstep"), pytest.raises(LookupError, match="mine"):
        use()
    assert [record.getMessage() for record in caplog.records] == [
        f"another task failed, too: {ZeroDivisionError('integer division or modulo by zero')!r}"
    ]


def test_after_an_error_what_has_not_begun_is_dropped_and_what_runs_ends(caplog):
    ran = []
    begun, gate = threading.Barrier(2), threading.Event()

    def work():
        meet(begun)
        wait(gate)
        ran.append("began before")

    engine = Engine(1)

    def let_go():
        while not engine._is_dropping:
            threading.Event().wait(0.001)
        gate.set()

    helper = threading.Thread(target=let_go)
    handles = []

    def use():
        with engine:
            handles.append(engine.submit(work))
            handles.append(engine.submit(ran.append, "never"))
            handles.append(engine.submit(ran.append, handles[1]))
            meet(begun)
            helper.start()
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        use()
    helper.join()
    working, dropped, after = handles
    assert ran == ["began before"]
    assert working.result() is None
    for handle in (dropped, after):
        with pytest.raises(ClosedError, match="'append' was dropped: the engine was closed before"):
            handle.result()
    assert caplog.records == []  # the caller that dropped them knows
    with engine:
        assert engine.submit(int).result() == 0  # opened again it drops nothing


def test_an_engine_that_cannot_open_leaves_the_handler_of_ctrl_c_alone():
    class Broken(InlineLanes):
        def open(self):
            raise OSError("no more threads")

    before = signal.getsignal(signal.SIGINT)
    engine = Engine(1, lanes=Broken)
    with pytest.raises(OSError, match="no more threads"):
        engine.__enter__()
    assert signal.getsignal(signal.SIGINT) == before
    with Engine(1):
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


# ---- memory


class MarkError(Exception):
    """One that can be looked for."""


def test_errors_that_were_seen_are_not_kept(engine):
    def fail_with_a_mark():
        with pytest.raises(MarkError) as caught:
            engine.submit(fail, MarkError()).result()
        return weakref.ref(caught.value)

    marks = [fail_with_a_mark() for _ in range(5)]
    engine.submit(int, device="cpu:0").result()  # the lanes are done with the tasks before
    engine.submit(int, device="cpu:1").result()
    gc.collect()
    assert [mark() for mark in marks] == [None] * 5


@pytest.mark.parametrize("which", ["reads", "writes"])
@pytest.mark.parametrize("place", [None, 3, torch.zeros(2)], ids=["None", "a number", "a tensor"])
def test_what_is_no_var_is_refused_and_the_engine_goes_on(engine, which, place):
    before = engine.Var(1)
    with pytest.raises(InputError, match=r"'add' can't read or write .*: make it with engine\.Var"):
        engine.submit(int, name="add", **{which: [before, place]})
    assert engine.submit(int, writes=[before]).result() == 0
    engine.waitall()


# ---- waits that can't end


def test_a_wait_for_a_task_that_can_never_start_is_refused():
    """As if the graph had lost count: one task more is unfinished than there are tasks."""
    engine = Engine(TWO).__enter__()
    engine.submit(int).result()
    engine.scheduler.graph.unfinished += 1
    for wait_for_all in (engine.waitall, engine.close):
        with pytest.raises(DeadlockError, match="1 task of the engine can't start"):
            wait_for_all()
    assert not [one for one in threading.enumerate() if one.name.startswith("evenstep")]
