"""Exceptions that come from outside, anywhere: a call is made wholly or not at all, and none hangs.

They are thrown into the thread (`PyThreadState_SetAsyncExc`, as notebooks and test runners do), or
raised by a signal handler of the user's or of torch's, as when a worker of a DataLoader is killed.
"""

import contextlib
import gc
import itertools
import multiprocessing
import os
import random
import signal

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from evenstep.callbacks import Callback
from interrupting import (
    BATCHES,
    LAYOUTS,
    QUICK,
    TRACED,
    InTwoCalls,
    OutsideError,
    Training,
    interrupted_at,
    interrupting,
    lanes_left,
    loader,
    press_ctrl_c,
    spread,
    thrown_after,
    thrown_at,
    undisturbed_course,
)
from layouts import own
from patience import HUNG_TESTS_ABORT, wait_until
from reference import assert_same_bits
from trainers import state_of

pytestmark = [HUNG_TESTS_ABORT, pytest.mark.usefixtures("own_handlers")]

STEPS = 4
OPENING = "Interrupts.", "Engine.", "Session.", "ThreadLanes", "Trainer."
STEPPING = (
    "Pipeline",
    "Session.",
    "Trainer.",
    "Engine.",
    "StepLoss",
    "Progress",
    "Update",
    "Replica",
)
EVALUATING = "OtherValues", "_having", "_copy_all", "_evaluating", "evaluation_mode"


@pytest.fixture(scope="module")
def course():
    return undisturbed_course(STEPS)


@pytest.fixture(scope="module")
def undisturbed(course):
    return course[0]


by_ctrl_c_or_thrown = pytest.mark.parametrize("act", [press_ctrl_c, "throw"])


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # Python prints, and drops, what is raised while it drops the generator of an epoch
@by_ctrl_c_or_thrown
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.thinned(4)
def test_thrown_into_steps(layout, act, course):
    states, losses = course
    for boundary in spread([*LAYOUTS].index(layout), 3, 211, 1777):
        training = Training(**{**QUICK, **LAYOUTS[layout]})
        generator = torch.get_rng_state()
        with training.trainer:
            # Python may call the handler of Ctrl-C only behind the code that was interrupted.
            ended = contextlib.suppress(OutsideError, KeyboardInterrupt)
            with ended, interrupting(act, boundary) as passed:
                training.run(STEPS)
            training.assert_is_at_a_step_of(states)
            training.run(STEPS)
            assert_same_bits(state_of(training.trainer), states[STEPS])
        found = {step: loss for step, loss in training.losses.items() if isinstance(loss, float)}
        assert found.items() <= losses.items()
        assert torch.equal(torch.get_rng_state(), generator)
        if len(passed) < boundary:
            break
    assert boundary > 5000


@pytest.mark.parametrize("layout", ["two", "in flight"])
def test_thrown_by_another_thread_at_random_moments(layout, undisturbed):
    delays, thrown = random.Random(3), 0
    for _ in range(20):
        training = Training(**{**QUICK, **LAYOUTS[layout]})
        with training.trainer:
            try:
                with thrown_after(0.03 * delays.random()):
                    training.run(STEPS)
                    wait_until(lambda: False)  # it was faster
            except OutsideError:
                thrown += 1
            training.assert_is_at_a_step_of(undisturbed)
            training.run(STEPS)
            assert_same_bits(state_of(training.trainer), undisturbed[STEPS])
    assert thrown == 20


IN_TWO_CALLS = ["one", "two", "in flight", "own in flight"]


@by_ctrl_c_or_thrown
@pytest.mark.parametrize("layout", IN_TWO_CALLS)
@pytest.mark.thinned(6)
def test_a_backward_pass_is_made_or_not(layout, act, undisturbed):
    """If it was made, its gradients are there; else gradients, buffers and the count are as before.

    A loop that goes on from `steps_done` then has lost no update.
    """
    for boundary in spread(IN_TWO_CALLS.index(layout), 4, 503, 2011):
        training = InTwoCalls(**{**QUICK, **LAYOUTS[layout]})
        with training.trainer:
            interrupted = interrupting(act, boundary)
            with interrupted as passed, contextlib.suppress(OutsideError, KeyboardInterrupt):
                training.run(STEPS)
            with contextlib.suppress(KeyboardInterrupt):  # one that came late is raised here
                training.update_if_left()
            training.run(STEPS)
            assert_same_bits(state_of(training.trainer), undisturbed[STEPS])
        if len(passed) < boundary:
            break
    assert boundary > 6536  # at least one was in time


def gradients_of(model):
    return [None if one.grad is None else one.grad.clone() for one in model.parameters()]


@TRACED
@by_ctrl_c_or_thrown
@pytest.mark.parametrize("layout", ["one", "in flight"])
def test_an_accumulating_backward_pass_is_made_or_not(layout, act):
    X, y = torch.randn(8, 3, generator=torch.Generator().manual_seed(2)), torch.arange(8) % 4

    def begun():
        training = Training(**{**QUICK, **LAYOUTS[layout]})
        training.trainer.open()
        training.trainer.backward(X, y)
        return training.trainer

    def noted(trainer):
        return trainer.steps_done, state_of(trainer), gradients_of(trainer.model)

    whole = begun()
    ends = [noted(whole)]
    whole.backward(X, y, accumulate=True)
    ends.append(noted(whole))
    whole.close()
    seen = set()
    for boundary in itertools.count(97, 811):
        trainer = begun()
        interrupted = interrupting(act, boundary)
        with interrupted as passed, contextlib.suppress(OutsideError, KeyboardInterrupt):
            trainer.backward(X, y, accumulate=True)
        steps, state, gradients = noted(trainer)
        assert_same_bits(state, ends[steps - 1][1])
        assert all(map(torch.equal, gradients, ends[steps - 1][2]))
        seen.add(steps)
        with contextlib.suppress(KeyboardInterrupt):  # one that came late is raised here
            trainer.close()
        if len(passed) < boundary:
            break
    assert seen == {1, 2}
    assert boundary > 1000


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(
    ("call", "act"),
    [
        *((call, "throw") for call in ("evaluate", "another model", "predict", "waitall", "save")),
        *((call, press_ctrl_c) for call in ("evaluate", "predict")),
    ],
)
@pytest.mark.thinned(6)
def test_in_other_calls(call, act, number, undisturbed, tmp_path):
    """Called again, they give what they would have given."""
    training = Training([1, 2, own(2)][number], **QUICK)
    trainer, make_call = training.trainer, training.calls(tmp_path)[call]
    with trainer:
        training.run(2)
        expected = make_call()
        for boundary in itertools.chain([53], spread(number, 3, 1354, 1301)):
            came = False
            try:
                with interrupting(act, boundary) as passed:
                    make_call()
            except (OutsideError, KeyboardInterrupt):
                came = True
            assert act == "throw" or came == (len(passed) >= boundary)
            assert trainer.model.training
            assert_same_bits(state_of(trainer), undisturbed[2])
            assert not [*tmp_path.glob(".*")]
            assert make_call() == expected
            if len(passed) < boundary:
                break
        assert boundary > 53
        training.run(STEPS)
        assert_same_bits(state_of(trainer), undisturbed[STEPS])


@pytest.mark.parametrize("layout", ["two", "in flight"])
@pytest.mark.parametrize(
    ("act", "first", "stride", "functions", "enough"),
    [
        ("throw", 7, 211, (), 2000),
        (press_ctrl_c, 71, 211, (), 2000),
        pytest.param("throw", 1, 1, OPENING, 300, marks=pytest.mark.slow),
    ],
    ids=["thrown", "Ctrl-C", "every place"],
)
@pytest.mark.thinned(2)
def test_while_a_trainer_is_opened_and_closed(
    layout, act, first, stride, functions, enough, undisturbed
):
    """No thread, handler or hook is left, and it can be opened again.

    Python's ExitStack, into which exceptions are thrown, too, forgets what it was about to undo.
    """
    handler = signal.getsignal(signal.SIGINT)
    for boundary in itertools.count(first, stride):
        training = Training(**{"check": "off", "tune_malloc": act != "throw", **LAYOUTS[layout]})
        interrupted = interrupting(act, boundary)
        if functions:
            interrupted = thrown_at(boundary, functions)
        ended = contextlib.suppress(OutsideError, KeyboardInterrupt)
        with ended, interrupted as passed, training.trainer:
            pass
        if act == "throw":
            wait_until(lambda: not lanes_left())  # one may just begin, and end
        assert lanes_left() == []
        assert signal.getsignal(signal.SIGINT) == handler
        with training.trainer:
            training.run(2)
            assert_same_bits(state_of(training.trainer), undisturbed[2])
        if len(passed) < boundary:
            break
    assert boundary > enough


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one", "in flight", "own in flight", "stages"])
def test_thrown_anywhere_in_what_takes_and_ends_steps(layout, undisturbed):
    for place in itertools.count(1):
        training = Training(**{**QUICK, **LAYOUTS[layout]})
        with training.trainer:
            with thrown_at(place, STEPPING) as passed, contextlib.suppress(OutsideError):
                training.run(3)
            training.assert_is_at_a_step_of(undisturbed)
            training.run(STEPS)
            assert_same_bits(state_of(training.trainer), undisturbed[STEPS])
        if len(passed) < place:
            break
    assert place > 100


def test_thrown_anywhere_in_what_puts_values_back(undisturbed):
    """One that came just before was not caught: the model kept another model's values."""
    training, other = Training(2, **QUICK), Training().trainer.model
    trainer = training.trainer
    with trainer:
        training.run(2)
        for place in itertools.count(1):
            with thrown_at(place, EVALUATING) as passed, contextlib.suppress(OutsideError):
                trainer.predict(training.loader, model=other)
            assert trainer.model.training
            assert_same_bits(state_of(trainer), undisturbed[2])
            if len(passed) < place:
                break
    assert place > 20


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of a file that has just been opened
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@by_ctrl_c_or_thrown
@pytest.mark.thinned(2)
def test_a_training_is_loaded_or_not(act, undisturbed, tmp_path):
    """The model has the saved values, or its own; loaded again, it is the saved one."""
    saved = Training(**QUICK)
    with saved.trainer as trainer:
        saved.run(2)
        trainer.save(tmp_path)
    for boundary in itertools.count(211, 5101):
        fresh = Training(**QUICK)
        before = state_of(fresh.trainer)
        interrupted = interrupting(act, boundary)
        with interrupted as passed, contextlib.suppress(OutsideError, KeyboardInterrupt):
            fresh.load(tmp_path)
        now = state_of(fresh.trainer)
        if now.keys() == before.keys():
            assert_same_bits(now, before)
        else:
            assert_same_bits(now, undisturbed[2])
        with fresh.load(tmp_path):
            fresh.run(STEPS)
        assert_same_bits(state_of(fresh.trainer), undisturbed[STEPS])
        if len(passed) < boundary:
            break
    assert boundary > 3000
    gc.collect()  # a file in a ring of references is warned of here, not in a test that follows


# ---- a worker of a loader that is killed


def kill_a_worker():
    """Kill a worker process of a loader; when this returns, SIGCHLD has been sent."""
    for worker in multiprocessing.active_children():
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has just ended
            os.kill(worker.pid, signal.SIGKILL)
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        return


def train_two_epochs(training, until=2 * BATCHES):
    """Train up to a step on batches of a loader with a worker process."""
    X, y = zip(*loader().dataset, strict=True)
    data = TensorDataset(torch.stack(X), torch.stack(y))
    batches = DataLoader(data, 8, shuffle=True, num_workers=1)
    while training.trainer.steps_done < until:
        for batch in training.trainer.epoch(batches):
            training.trainer.step(*batch)
            if training.trainer.steps_done >= until:
                break
    training.trainer.waitall()


@pytest.fixture(scope="module")
def loaded_course():
    """The state after each step, and the number of boundaries."""
    whole, states = Training(**QUICK), {}
    with whole.trainer:
        for number in range(2 * BATCHES + 1):
            train_two_epochs(whole, number)
            states[number] = state_of(whole.trainer)
    whole = Training(**QUICK)
    with whole.trainer, interrupted_at(0) as passed:
        train_two_epochs(whole)
    return states, len(passed)


@pytest.fixture
def torchs_handler():
    """Torch's handler of SIGCHLD raises if a worker has died; it is set once in a process."""
    before = signal.getsignal(signal.SIGCHLD)
    utils = torch.utils.data._utils.signal_handling
    utils._SIGCHLD_handler_set = False
    yield
    signal.signal(signal.SIGCHLD, before)
    utils._SIGCHLD_handler_set = False


@pytest.mark.usefixtures("torchs_handler")
@pytest.mark.parametrize(
    ("number", "layout"),
    [
        pytest.param(0, "two", marks=pytest.mark.slow),
        (1, "in flight"),
        pytest.param(2, "own in flight", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_killed_worker_of_a_loader_ends_the_loop_with_torchs_error(number, layout, loaded_course):
    (states, passed), ends = loaded_course, set()
    first = passed // 2 + number * passed // 14
    for boundary in range(first, passed, 3 * passed // 14):
        training = Training(**{**QUICK, **LAYOUTS[layout]})
        with training.trainer as trainer:
            try:
                with interrupted_at(boundary, kill_a_worker):
                    train_two_epochs(training)
                ends.add("done")
            except RuntimeError as error:
                ends.add("killed" if "DataLoader worker" in str(error) else str(error))
            trainer.waitall()
            assert_same_bits(state_of(trainer), states[trainer.steps_done])
            train_two_epochs(training)
            assert_same_bits(state_of(trainer), states[2 * BATCHES])
    assert "killed" in ends
    assert ends <= {"killed", "done"}


# ---- counted and begun


class Silent(Callback):
    pass


def test_a_step_that_fails_before_it_begins_is_not_counted():
    training = Training(callbacks=[Silent()], **QUICK)
    with training.trainer as trainer:
        training.run(1)
        before = state_of(trainer)
        rate = training.optimizer.param_groups[0]["lr"]
        training.optimizer.param_groups[0]["lr"] = "fast"
        with pytest.raises(ValueError, match="fast"):
            trainer.step(torch.ones(8, 3), torch.zeros(8).long())
        assert trainer.steps_done == 1
        training.optimizer.param_groups[0]["lr"] = rate
        assert_same_bits(state_of(trainer), before)
        training.run(2)
        assert trainer.steps_done == 2
