"""Signals are recorded while a shielded function runs, and handed on where nothing is half done."""

import itertools
import signal
import sys
import threading

import pytest

from evenstep.engine.interrupts import INTERRUPTS, interruptible
from interrupting import TRACED, interrupted_at
from patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("own_handlers")

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGWINCH, signal.SIGRTMIN]


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def handled():
    with INTERRUPTS.handled():
        yield


@INTERRUPTS.uninterrupted
def whole(done, *acts):
    for act in acts:
        act()
    done.append("all")


@pytest.mark.usefixtures("handled")
def test_ctrl_c_inside_is_raised_at_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt):
        whole(done, press_ctrl_c)
    assert done == ["all"]
    whole(done)  # it is forgotten
    assert done == ["all", "all"]


@pytest.mark.usefixtures("handled")
def test_ctrl_c_outside_is_raised_at_once():
    whole([])
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()


@pytest.mark.usefixtures("handled")
def test_pressed_twice_inside_it_is_raised_once():
    with pytest.raises(KeyboardInterrupt):
        whole([], press_ctrl_c, press_ctrl_c)
    whole([])


@pytest.mark.usefixtures("handled")
def test_one_inside_another_leaves_it_to_the_outer_one():
    inner, outer = [], []
    with pytest.raises(KeyboardInterrupt):
        whole(outer, lambda: whole(inner, press_ctrl_c), lambda: inner.append("goes on"))
    assert (inner, outer) == (["all", "goes on"], ["all"])


@pytest.mark.usefixtures("handled")
def test_the_users_code_inside_is_interrupted_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt):
        whole(done, lambda: interruptible(lambda: (press_ctrl_c(), done.append("not here"))))
    assert done == []


@pytest.mark.usefixtures("handled")
def test_a_check_raises_inside():
    done = []
    with pytest.raises(KeyboardInterrupt):
        whole(done, press_ctrl_c, lambda: done.append("still"), INTERRUPTS.check)
    assert done == ["still"]


@pytest.mark.usefixtures("handled")
def test_an_error_inside_and_ctrl_c_are_both_seen():
    def fail():
        raise LookupError

    with pytest.raises(KeyboardInterrupt) as raised:
        whole([], press_ctrl_c, fail)
    assert isinstance(raised.value.__context__, LookupError)


@pytest.mark.usefixtures("handled")
def test_other_threads_are_no_business_of_the_signals():
    """A shielded call in another thread neither records nor raises what the main thread gets."""
    inside, end, errors = threading.Event(), threading.Event(), []

    def in_a_thread():
        try:
            whole([], inside.set, lambda: end.wait(PATIENCE_S), INTERRUPTS.check)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    assert inside.wait(PATIENCE_S)
    with pytest.raises(KeyboardInterrupt):
        press_ctrl_c()
    end.set()
    thread.join(PATIENCE_S)
    assert errors == []


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_the_users_own_handler_is_called_and_put_back(number):
    calls = []
    own = lambda number, frame: calls.append((number, frame is not None))  # noqa: E731
    signal.signal(number, own)
    with INTERRUPTS.handled():
        assert signal.getsignal(number) != own
        whole([], lambda: signal.raise_signal(number), lambda: calls.append("before"))
        assert calls == ["before", (number, True)]
        signal.raise_signal(number)
        assert len(calls) == 3
    assert signal.getsignal(number) == own
    signal.signal(number, signal.SIG_DFL)


@pytest.mark.usefixtures("handled")
def test_while_held_only_ctrl_c_is_raised_in_a_wait():
    """A handler that saves waits for the end."""
    done = []
    signal.signal(signal.SIGTERM, lambda number, frame: done.append("saved"))
    INTERRUPTS.follow()

    def wait_held():
        with INTERRUPTS.held():
            signal.raise_signal(signal.SIGTERM)
            INTERRUPTS.check()
            assert done == []
            press_ctrl_c()
            with pytest.raises(KeyboardInterrupt):
                INTERRUPTS.check()

    whole(done, wait_held)
    assert done == ["all", "saved"]


@TRACED
@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("other", [signal.SIGTERM, signal.SIGUSR1])
def test_at_any_moment_of_a_delivery_a_signal_may_come_and_none_is_lost(other):
    calls = []
    for number in {signal.SIGTERM, other}:
        signal.signal(number, lambda number, frame: calls.append(number))
    INTERRUPTS.follow()
    for boundary in itertools.count(1):
        calls.clear()
        with interrupted_at(boundary, lambda: signal.raise_signal(other)) as passed:
            whole([], lambda: signal.raise_signal(signal.SIGTERM))
        if len(passed) < boundary:
            break
        assert set(calls) == {signal.SIGTERM, other}
        assert len(calls) == 2 or other == signal.SIGTERM  # what comes again counts once
        assert not INTERRUPTS.pending
    assert boundary > 50


@pytest.mark.parametrize("ignored", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_process_without_a_handler_keeps_it_so(ignored):
    signal.signal(signal.SIGINT, ignored)
    with INTERRUPTS.handled():
        assert signal.getsignal(signal.SIGINT) == ignored
    assert signal.getsignal(signal.SIGINT) == ignored


def test_a_handler_that_was_set_meanwhile_is_followed_and_stays():
    calls = []
    own = lambda number, frame: calls.append(number)  # noqa: E731
    with INTERRUPTS.handled():
        before = signal.signal(signal.SIGINT, own)
        INTERRUPTS.follow()
        whole([], press_ctrl_c, lambda: calls.append("before"))
        assert calls == ["before", signal.SIGINT]
        signal.signal(signal.SIGINT, before)  # as libraries do at the end of a `with`
        with pytest.raises(KeyboardInterrupt):
            whole([], press_ctrl_c)
        signal.signal(signal.SIGINT, own)
    assert signal.getsignal(signal.SIGINT) == own


def test_opened_twice_it_ends_with_the_last():
    before = signal.getsignal(signal.SIGINT)
    with INTERRUPTS.handled():
        with INTERRUPTS.handled():
            pass
        done = []
        with pytest.raises(KeyboardInterrupt):
            whole(done, press_ctrl_c)
        assert done == ["all"]
    assert signal.getsignal(signal.SIGINT) == before


def in_a_thread(function):
    errors = []

    def run():
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(PATIENCE_S)
    assert errors == []


def test_other_threads_replace_nothing_and_close_what_the_main_thread_opened():
    before = signal.getsignal(signal.SIGINT)

    def handle():
        with INTERRUPTS.handled():
            assert signal.getsignal(signal.SIGINT) == before

    in_a_thread(handle)
    opened = INTERRUPTS.handled()
    opened.__enter__()
    in_a_thread(lambda: opened.__exit__(None, None, None))
    with pytest.raises(KeyboardInterrupt):  # the handler is still there, and hands it on
        press_ctrl_c()


def test_ctrl_c_at_every_bytecode_of_a_shielded_call():
    """Interrupted anywhere, the call is made completely or not at all, and its lock is free."""
    lock, boundaries, ends = threading.Lock(), 0, set()

    @INTERRUPTS.uninterrupted
    def both(done):
        with lock:
            done.append(1)
            done.append(2)

    def interrupt_at(k, done):
        seen = 0

        def trace(frame, event, argument):
            nonlocal seen
            frame.f_trace_opcodes = True
            if event == "opcode":
                seen += 1
                if seen == k:
                    press_ctrl_c()
            return trace

        sys.settrace(trace)
        try:
            both(done)
        finally:
            sys.settrace(None)
        return seen

    with INTERRUPTS.handled():
        for boundaries in range(1, 1000):
            done = []
            try:
                if interrupt_at(boundaries, done) < boundaries:
                    break
            except KeyboardInterrupt:
                pass
            assert not lock.locked()
            ends.add(tuple(done))
    assert ends == {(), (1, 2)}
    assert 20 < boundaries < 1000
