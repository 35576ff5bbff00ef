"""Lanes that end, or never start: whatever waits for them ends too, with the reason."""

import contextlib
import signal
import threading

import pytest

from dying import KINDS, SilentError, end_lane
from evenstep.engine import Engine, InlineLanes, ThreadLanes
from evenstep.errors import DeviceError, DeviceLostError
from layouts import TWO
from patience import HUNG_TESTS_ABORT, wait

pytestmark = HUNG_TESTS_ABORT

both = pytest.mark.parametrize("lanes", [ThreadLanes, InlineLanes])


def fail(kind):
    raise kind


# ---- exceptions that refuse what the engine does with exceptions


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_that_refuses_attributes_reaches_the_caller(engine, kind):
    error = kind()
    handle = engine.submit(fail, error)
    dependant = engine.submit(str, handle)
    for waiting in (handle, dependant):
        with pytest.raises(kind) as caught:
            waiting.result()
        assert caught.value is error
        assert caught.traceback[-1].name == "fail"
    assert engine.submit(int).result() == 0


@both
def test_several_exceptions_that_cannot_be_printed_are_counted(lanes):
    engine = Engine(1, lanes=lanes)
    engine.__enter__()
    for error in (LookupError("first"), SilentError(), SilentError()):
        engine.submit(fail, error)
    with pytest.raises(LookupError) as caught:
        engine.close()
    assert caught.value.__notes__[-1] == (
        "2 more failed: (its text can't be printed: LookupError), ..."
    )


# ---- a thread that ends


@pytest.mark.parametrize("copies", [False, True])
def test_a_lane_that_ends_is_a_device_that_is_lost(copies):
    with Engine(TWO) as engine:
        before = engine.submit(int, device="cpu:1")
        assert before.result() == 0
        end_lane(engine, engine.copy_lane(1) if copies else 1)
        calls = [
            lambda: engine.submit(int, device="cpu:1"),
            lambda: engine.copy(1, "cpu:1"),
            lambda: engine.submit(str, engine.copy(1, "cpu:1")),
        ]
        for call in calls[copies:]:
            with pytest.raises(DeviceLostError, match="cpu:1 was lost") as caught:
                call().result()
            assert isinstance(caught.value.__cause__, SystemExit)
        assert engine.submit(int, device="cpu:0").result() == 0
        assert engine.submit(int).result() == 0


def test_a_lane_that_ends_within_a_task_ends_what_waits_for_it():
    """What no lane may do: the call that was put raises."""
    with Engine(TWO) as engine:
        held = threading.Event()
        working = engine.submit(wait, held, device="cpu:1")
        queued = engine.submit(int, device="cpu:1")
        engine.lanes.put(1, lambda lane: fail(SystemExit(3)))
        held.set()
        assert working.result() is None
        with contextlib.suppress(DeviceLostError):
            assert queued.result() == 0  # if it came before the call
        with pytest.raises(DeviceLostError, match="cpu:1 was lost") as caught:
            [engine.submit(int, device="cpu:1").result() for _ in range(10_000)]
        assert caught.value.__cause__.code == 3


def test_an_engine_whose_lanes_have_all_ended_closes():
    with Engine(TWO) as engine:
        for lane in (0, 1):
            end_lane(engine, lane)
        for device in (*TWO, None):
            with pytest.raises(DeviceLostError):
                [engine.submit(int, device=device).result() for _ in range(2)]
        engine.waitall()


# ---- a thread that never starts


class NotSetUp(ThreadLanes):
    def _set_up(self, lane, device):
        if lane == 3:
            raise MemoryError("no room for a stack")
        super()._set_up(lane, device)


class NoMoreThreads(ThreadLanes):
    """Of which the system grants three threads."""

    def open(self):
        start, started = threading.Thread.start, []

        def start_some(thread):
            if len(started) == 3:
                raise RuntimeError("can't start new thread")
            started.append(thread)
            start(thread)

        threading.Thread.start = start_some
        try:
            super().open()
        finally:
            threading.Thread.start = start


@pytest.mark.parametrize(
    ("lanes", "part"),
    [(NotSetUp, "no room for a stack"), (NoMoreThreads, "after 3 threads .* can't start new")],
)
def test_a_lane_that_does_not_start_is_an_error_that_leaves_nothing_behind(lanes, part):
    before = signal.getsignal(signal.SIGINT)
    engine = Engine(TWO, lanes=lanes)
    for _ in range(2):
        with pytest.raises(DeviceError, match="2 devices need two threads each") as caught:
            engine.__enter__()
        assert caught.match(part) if "after" not in part else caught.match("can't start new")
        assert not [one for one in threading.enumerate() if one.name.startswith("evenstep")]
        assert signal.getsignal(signal.SIGINT) == before
