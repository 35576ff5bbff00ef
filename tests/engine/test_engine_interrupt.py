"""Ctrl-C: wherever it comes, what runs ends, what has not begun is dropped, nothing hangs."""

import contextlib
import itertools
import signal
import threading

import pytest
import torch

from evenstep.engine import Engine, InlineLanes, ThreadLanes
from evenstep.errors import ClosedError
from interrupting import interrupted_at
from patience import HUNG_TESTS_ABORT, main_thread_is_in, meet, wait, wait_until

pytestmark = HUNG_TESTS_ABORT

both = pytest.mark.parametrize("lanes", [ThreadLanes, InlineLanes])


@pytest.fixture
def press_ctrl_c():
    """Return a function that interrupts the main thread once, as a terminal does, where it waits.

    It returns when the handler was called. Once is enough: no wait misses a signal.
    """
    noticed = []

    def on_signal(number, frame):
        noticed.append(number)
        raise KeyboardInterrupt

    def press():
        wait_until(lambda: main_thread_is_in("_await", "_finish"))
        presses = len(noticed)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        wait_until(lambda: len(noticed) > presses)

    before = signal.signal(signal.SIGINT, on_signal)
    yield press
    signal.signal(signal.SIGINT, before)


# ---- while the front end waits


@pytest.mark.parametrize("waiting", ["a handle", "a var", "all", "the bound"])
def test_ctrl_c_ends_the_wait_and_the_engine_goes_on(press_ctrl_c, waiting):
    release = threading.Event()
    with Engine(2, max_in_flight=2 if waiting == "the bound" else None) as engine:
        x = engine.Var("x")
        stuck = engine.submit(wait, release, device="cpu:0", writes=[x])
        engine.submit(press_ctrl_c, device="cpu:1")
        waits = {
            "a handle": stuck.result,
            "a var": x.result,
            "all": engine.waitall,
            "the bound": lambda: (engine.submit(int), engine.submit(int, device="cpu:0"), x.item()),
        }
        with pytest.raises(KeyboardInterrupt):
            waits[waiting]()
        release.set()
        assert engine.submit(int).result() == 0
        assert x.result() == "x"


@pytest.mark.parametrize("presses", [1, 2, 4])
def test_ctrl_c_drops_what_has_not_begun_and_waits_for_what_runs(press_ctrl_c, presses):
    """However often it is pressed, `with` does not end while a task is at work."""
    ran = []
    begun = threading.Barrier(2)
    pressed = threading.Event()

    def work(name, times):
        meet(begun)
        for _ in range(times):
            press_ctrl_c()
            pressed.set()
        wait(pressed)
        threading.Event().wait(0.02)  # an interrupt that did not wait would overtake this
        ran.append(name)

    handles = []

    def use():
        with Engine(2) as engine:
            handles.append(engine.submit(work, "one", presses, device="cpu:0"))
            handles.append(engine.submit(work, "two", 0, device="cpu:1"))
            handles.extend(engine.submit(ran.append, "never", device=d) for d in engine.devices)
            if presses % 2:
                handles[0].result()  # else it is pressed while `with` ends

    with pytest.raises(KeyboardInterrupt):
        use()
    assert sorted(ran) == ["one", "two"]
    assert handles[0].result() is handles[1].result() is None
    for handle in handles[2:]:
        with pytest.raises(ClosedError, match="was dropped"):
            handle.result()


def test_ctrl_c_at_the_end_is_raised_even_if_there_is_nothing_to_drop(press_ctrl_c):
    engine = Engine(1)
    engine.__enter__()
    handle = engine.submit(press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert handle.result() is None


# ---- while the front end keeps its books


@both
def test_ctrl_c_during_the_last_submission_does_not_hang_the_end(lanes):
    engine = Engine(1, lanes=lanes)
    submit = engine.scheduler.submit

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGINT)
        return submit(*arguments)

    engine.scheduler.submit = interrupted
    with pytest.raises(KeyboardInterrupt), engine:
        engine.submit(int)
    assert engine.scheduler.graph.unfinished == 0


def use_engine(engine, ran, x):
    """Submit, wait and read in all ways."""
    first = engine.submit(ran.append, "first", writes=[x])
    engine.copy(torch.zeros(1), "cpu:1").result()
    first.result()
    x.result()
    engine.waitall()


@pytest.mark.parametrize("bound", [None, 1])
@pytest.mark.parametrize("stride", [61, pytest.param(1, marks=pytest.mark.slow)])
def test_ctrl_c_at_bytecodes_of_the_front_end(bound, stride):
    """No lock is left wrong: the engine goes on, and each task ran wholly or not at all."""
    with Engine(2, max_in_flight=bound) as engine:
        for boundary in itertools.count(1, stride):
            ran, x = [], engine.Var(None)
            with contextlib.suppress(KeyboardInterrupt), interrupted_at(boundary) as passed:
                use_engine(engine, ran, x)
            engine.waitall()
            assert ran in ([], ["first"])
            assert engine.scheduler.graph.unfinished == 0
            assert not engine._lock.locked()
            if len(passed) < boundary:
                break
    assert boundary > 1000
