"""A lock that Ctrl-C can't break into."""

import signal
import threading

import pytest

from evenstep.engine.guard import Guard
from patience import PATIENCE_S, meet


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_inside_the_lock_is_put_off_to_its_end():
    guard = Guard()
    done = []
    with guard.protected():
        with pytest.raises(KeyboardInterrupt), guard:
            done.append((press_ctrl_c(), "the rest"))
        with guard:  # the lock is free again, and the signal is forgotten
            done.append("the next")
    assert done == [(None, "the rest"), "the next"]


def test_ctrl_c_outside_the_lock_comes_at_once():
    guard = Guard()
    with guard.protected():
        with guard:
            pass
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()


def test_pressed_twice_it_comes_once():
    guard = Guard()
    with guard.protected():
        with pytest.raises(KeyboardInterrupt), guard:
            _ = press_ctrl_c(), press_ctrl_c()
        with guard:
            pass


def test_ctrl_c_is_put_off_while_another_thread_has_the_lock():
    guard = Guard()
    barrier = threading.Barrier(2)
    inside = []

    def hold():
        with guard:
            meet(barrier)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            threading.Event().wait(0.02)  # it would come now

    thread = threading.Thread(target=hold)
    before = signal.signal(signal.SIGINT, lambda *_: inside.append(guard._lock.locked()))
    try:
        with guard.protected():
            thread.start()
            meet(barrier)
            with guard:
                inside.append("in")
        thread.join(PATIENCE_S)
    finally:
        signal.signal(signal.SIGINT, before)
    assert inside in (["in", False], [True, "in"], [False, "in"])  # before the lock, or after it
    assert not thread.is_alive()


def test_an_error_inside_the_lock_frees_it():
    guard = Guard()
    with pytest.raises(LookupError), guard:
        raise LookupError
    with guard:
        pass


def test_the_users_own_handler_is_called_and_put_back():
    calls = []
    own = lambda number, frame: calls.append((number, frame is not None))  # noqa: E731
    before = signal.signal(signal.SIGINT, own)
    try:
        guard = Guard()
        with guard.protected():
            assert signal.getsignal(signal.SIGINT) != own
            with guard:
                press_ctrl_c()
                assert calls == []
            assert calls == [(signal.SIGINT, True)]
            press_ctrl_c()
            assert len(calls) == 2
        assert signal.getsignal(signal.SIGINT) == own
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("ignored", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_process_without_a_handler_keeps_it_so(ignored):
    before = signal.signal(signal.SIGINT, ignored)
    try:
        guard = Guard()
        with guard.protected(), guard:
            assert signal.getsignal(signal.SIGINT) == ignored
        assert signal.getsignal(signal.SIGINT) == ignored
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_was_set_meanwhile_stays():
    before = signal.getsignal(signal.SIGINT)
    try:
        guard = Guard()
        with guard.protected():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_one_guard_inside_another():
    before = signal.getsignal(signal.SIGINT)
    outer, inner = Guard(), Guard()
    with outer.protected(), inner.protected():
        for guard in (outer, inner):
            done = []
            with pytest.raises(KeyboardInterrupt), guard:
                done.append((press_ctrl_c(), "the rest"))
            assert len(done) == 1
    assert signal.getsignal(signal.SIGINT) == before


def test_other_threads_protect_nothing_and_close_what_the_main_thread_opened():
    before = signal.getsignal(signal.SIGINT)
    errors = []

    def in_a_thread(function):
        def run():
            try:
                function()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(PATIENCE_S)
        assert errors == []

    def protect():
        with Guard().protected():
            assert signal.getsignal(signal.SIGINT) == before

    in_a_thread(protect)
    guard = Guard()
    opened = guard.protected()
    opened.__enter__()
    try:
        in_a_thread(lambda: opened.__exit__(None, None, None))
        with pytest.raises(KeyboardInterrupt):  # the handler is still there, and hands it on
            press_ctrl_c()
    finally:
        signal.signal(signal.SIGINT, before)
