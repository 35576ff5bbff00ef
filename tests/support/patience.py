"""Waiting in tests: with an end, so that a wrong program fails instead of hanging."""

import faulthandler
import os
import signal
import tempfile
import threading

import pytest

PATIENCE_S = 40  # far more than a right program needs
LIMIT_S = 60
"""The limit of a test with lanes: longer than the patience of what waits in it."""

# An engine whose lane has died would wait for it again after pytest's own interruption.
HUNG_TESTS_ABORT = pytest.mark.timeout(LIMIT_S, method="thread")


def wait(*events):
    for event in events:
        assert event.wait(PATIENCE_S)


def meet(barrier):
    barrier.wait(PATIENCE_S)


def wait_until(condition):
    """Look every millisecond whether `condition()` holds."""
    for _ in range(PATIENCE_S * 1000):
        if condition():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it never came to be")


_STACKS, _name = tempfile.mkstemp()
os.unlink(_name)


def main_thread_is_in(*functions):
    """Return whether the main thread is inside a function of one of these names.

    It writes its stack itself, in C: evenstep leaves handlers alone that are not Python code.
    Another thread must not look: Python 3.11 may crash or hang where one thread walks the frames of
    another one that runs.
    """
    faulthandler.unregister(signal.SIGURG)  # Lightning replaces handlers that are not Python code
    faulthandler.register(signal.SIGURG, _STACKS, all_threads=False)
    os.lseek(_STACKS, 0, os.SEEK_SET)
    os.ftruncate(_STACKS, 0)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGURG)
    before = ""
    for _ in range(1000):
        stack = os.pread(_STACKS, 1 << 16, 0).decode()
        if stack and stack == before:
            ends = tuple(f" in {name}" for name in functions)
            return any(line.endswith(ends) for line in stack.splitlines())
        before = stack
        threading.Event().wait(0.001)
    return False


def only_one_interrupt(request):
    """Have the first Ctrl-C raise, and others not; return the list of those that came."""
    noticed = []

    def on_signal(number, frame):
        if not noticed:
            noticed.append(number)
            raise KeyboardInterrupt

    handler = signal.signal(signal.SIGINT, on_signal)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
    return noticed


def press_ctrl_c_when(*functions):
    """Interrupt the main thread as soon as it is in one of these; return the thread that does."""

    def press():
        wait_until(lambda: main_thread_is_in(*functions))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread
