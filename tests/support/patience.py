"""Waiting in tests: with an end, so that a wrong program fails instead of hanging."""

import gc
import signal
import sys
import threading

import pytest

PATIENCE_S = 15  # far more than a right program needs
LIMIT_S = 20
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


def main_frame():
    """Return the frame in which the main thread is now.

    Python 3.11 to 3.12 hold a lock of the interpreter while they collect the frames; a garbage
    collection that begins there may wait for a thread that waits for the same lock, for ever.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()[threading.main_thread().ident]
    finally:
        if was_enabled:
            gc.enable()


def main_thread_is_in(*functions):
    """Return whether the main thread is inside a function of one of these names."""
    frame = main_frame()
    while frame is not None and frame.f_code.co_name not in functions:
        frame = frame.f_back
    return frame is not None


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
