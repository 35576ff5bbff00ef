"""Ctrl-C anywhere: a step is taken wholly or not at all, and going on gives the undisturbed run."""

import contextlib
import itertools
import signal
import threading

import pytest
import torch
from torch import nn

from evenstep.engine import Engine
from evenstep.errors import DeviceLostError
from interrupting import (
    BATCHES,
    TRACED,
    Training,
    interrupted_at,
    lanes_left,
    press_ctrl_c,
    undisturbed_course,
)
from layouts import own
from patience import HUNG_TESTS_ABORT, main_thread_is_in, wait, wait_until
from reference import assert_same_bits
from trainers import open_trainer, state_of

pytestmark = [HUNG_TESTS_ABORT, pytest.mark.usefixtures("own_handlers")]

STEPS = 4
NAMES = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(scope="module")
def undisturbed():
    return undisturbed_course(STEPS)


def interrupt_once(training, boundary, undisturbed, until):
    """Train to a step, interrupted at a boundary, and go on; return the boundaries passed."""
    states, losses = undisturbed
    # Python may call the handler only behind the code that was interrupted.
    with contextlib.suppress(KeyboardInterrupt), interrupted_at(boundary) as passed:
        training.run(until)
    training.assert_is_at_a_step_of(states)
    training.run(until)
    training.assert_is_at_a_step_of(states)
    found = {step: loss for step, loss in training.losses.items() if isinstance(loss, float)}
    assert found.items() <= losses.items()
    return passed


@pytest.mark.exhaustive
@pytest.mark.timeout(3000)
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # Python prints, and drops, what is raised while it drops the generator of an epoch
@pytest.mark.parametrize(
    ("devices", "max_in_flight", "stride"),
    [(1, 1, 1), (2, 1, 1), (own(2), 1, 1), (1, 2, 7), (2, 2, 1), (own(2), 2, 7)],
    ids=str,
)
def test_ctrl_c_at_every_bytecode(devices, max_in_flight, stride):
    """Of a step (with steps in flight, of two); one training is interrupted again and again."""
    training, whole = Training(devices, max_in_flight), Training()
    with training.trainer, whole.trainer:
        training.run(BATCHES)
        whole.run(BATCHES)
        for boundary in itertools.count(1, stride):
            states = {whole.trainer.steps_done: state_of(whole.trainer)}
            training.losses, whole.losses = {}, {}
            for _ in range(max_in_flight):
                whole.run(whole.trainer.steps_done + 1)
                states[whole.trainer.steps_done] = state_of(whole.trainer)
            losses = {step: float(loss) for step, loss in whole.losses.items()}
            until = whole.trainer.steps_done
            passed = interrupt_once(training, boundary, (states, losses), until)
            if len(passed) < boundary:
                break
    assert boundary > 2000


# ---- beside the steps


def evaluate(trainer, batches):
    return trainer.evaluate(batches, {"mean": lambda output, y: (output.sum(), len(y))})


@TRACED
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_ctrl_c_while_a_trainer_is_closed(max_in_flight, undisturbed):
    """No thread and no handler is left, and what was trained stays as it is."""
    states, _ = undisturbed
    handler = signal.getsignal(signal.SIGINT)
    for boundary in range(1, 600, 61):
        closed = Training(1, max_in_flight, check="off")
        closed.trainer.__enter__()
        closed.run(2)
        with pytest.raises(KeyboardInterrupt), interrupted_at(boundary):
            closed.trainer.__exit__(None, None, None)
        assert lanes_left() == []
        assert signal.getsignal(signal.SIGINT) == handler
        assert_same_bits(state_of(closed.trainer), states[2])


def test_the_users_batches_are_interrupted_at_once():
    def batches():
        yield (torch.ones(4, 3), torch.ones(4).long())
        press_ctrl_c()
        raise AssertionError("it was not interrupted")

    with Training().trainer as trainer:
        with pytest.raises(KeyboardInterrupt):
            evaluate(trainer, batches())
        assert trainer.model.training


# ---- other handlers


class StoppedError(Exception):
    """Raised by a handler of the user's."""


@pytest.mark.parametrize("number", NAMES, ids=lambda number: number.name)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_handler_that_raises_in_a_step(number, late, max_in_flight, undisturbed):
    """Whether it was installed before the trainer was opened, or in its `with`."""

    def stop(number, frame):
        raise StoppedError

    states, _ = undisturbed
    training = Training(2, max_in_flight, check="off")
    if not late:
        signal.signal(number, stop)
    with training.trainer:
        if late:
            signal.signal(number, stop)
        for boundary in range(100, 9000, 1501):
            interrupted = interrupted_at(boundary, lambda: signal.raise_signal(number))
            with interrupted, contextlib.suppress(StoppedError):
                training.run(STEPS)
            training.assert_is_at_a_step_of(states)
        training.run(STEPS)
        training.assert_is_at_a_step_of(states)
    assert signal.getsignal(number) == stop


# ---- a shard that takes long


class Slow(nn.Module):
    """Waits in forward for an event, in the lanes where it was asked to."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1.0
        if HELD:
            is_held = threading.current_thread().name in HELD
            STARTED.set() if is_held else wait(STARTED)
            wait(*[LET_GO] * is_held)
        return self.layer(x)


HELD, STARTED, LET_GO, OVER = set(), *(threading.Event() for _ in range(3))
X, Y = torch.ones(8, 3), torch.zeros(8).long()


@pytest.fixture
def let_go(monkeypatch):
    monkeypatch.setattr(Engine, "patience_s", 0.2)
    STARTED.clear()
    LET_GO.clear()
    OVER.clear()
    yield
    OVER.set()
    HELD.clear()
    LET_GO.set()


def press_when(condition):
    def press():
        wait_until(lambda: OVER.is_set() or condition())
        if not OVER.is_set():  # after a failure, it must not hit the next test
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


@pytest.mark.usefixtures("let_go")
@pytest.mark.parametrize("call", ["step", "evaluate"])
@pytest.mark.parametrize(("held", "needed"), [("evenstep cpu:0", True), ("evenstep cpu:1", False)])
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.thinned(2)
def test_the_second_ctrl_c_gives_up_a_device_that_is_still_at_work(
    call, held, needed, max_in_flight, caplog
):
    """And training goes on, unless it computes on the user's own module."""
    needed = needed and max_in_flight == 1
    given = {"shards": 8, "check": "off", "max_in_flight": max_in_flight}
    refused_at_the_end = pytest.raises(DeviceLostError) if needed else contextlib.nullcontext()
    torch.manual_seed(0)
    with refused_at_the_end, open_trainer(Slow(), devices=2, **given) as trainer:
        trainer.step(X, Y)
        trainer.waitall()
        before = state_of(trainer)
        pace = trainer._executor.pace
        pace.seconds[:] = [1e-3, 1e-3]  # a device that was held up gets no shards on a busy machine
        HELD.add(held)
        first = press_when(lambda: STARTED.is_set() and main_thread_is_in("_wait_for", "wait_for"))
        second = press_when(lambda: not first.is_alive() and main_thread_is_in("drain", "_drain"))
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            if call == "step":
                float(trainer.step(X, Y))
            else:
                evaluate(trainer, [(X, Y)])
        first.join()
        second.join()
        assert trainer.steps_done == 1
        assert f"{held.split()[1]} is given up" in caplog.text
        assert not LET_GO.is_set()
        HELD.clear()
        if needed:
            for refused in (trainer.waitall, lambda: trainer.step(X, Y)):
                with pytest.raises(DeviceLostError, match="load the last checkpoint"):
                    refused()
        else:
            assert_same_bits(state_of(trainer), before)
            trainer.step(X, Y)
            trainer.waitall()
            torch.manual_seed(0)
            with open_trainer(Slow(), devices=1, **given) as undisturbed:
                undisturbed.step(X, Y)
                undisturbed.step(X, Y)
            assert_same_bits(state_of(trainer), state_of(undisturbed))
        LET_GO.set()


@pytest.mark.usefixtures("let_go")
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_the_second_ctrl_c_leaves_an_update_that_hangs(max_in_flight):
    """The model may be half updated, which is said, and the trainer is of no use any more."""
    held = []

    def after_update(module):
        if held:
            STARTED.set()
            wait(LET_GO)

    given = {"shards": 8, "check": "off", "max_in_flight": max_in_flight}
    refused_at_the_end = pytest.raises(DeviceLostError)
    with refused_at_the_end, open_trainer(Slow(), after_update=after_update, **given) as trainer:
        trainer.step(X, Y)
        trainer.waitall()
        held.append(True)
        first = press_when(lambda: STARTED.is_set() and main_thread_is_in("_wait_for", "wait_for"))
        second = press_when(lambda: not first.is_alive() and main_thread_is_in("drain", "_drain"))
        with pytest.raises(KeyboardInterrupt):
            float(trainer.step(X, Y))
        first.join()
        second.join()
        with pytest.raises(DeviceLostError, match="load the last checkpoint"):
            trainer.step(X, Y)
        LET_GO.set()
