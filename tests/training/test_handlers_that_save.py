"""A handler of a signal saves the training, wherever the signal comes, as before preemption."""

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import evenstep
from evenstep.data import GeneratorStates, Loader
from evenstep.errors import InputError
from grouping import grouped
from interrupting import (
    LAYOUTS,
    QUICK,
    TRACED,
    InTwoCalls,
    Training,
    interrupted_at,
    spread,
    undisturbed_course,
)
from launched import launched
from patience import HUNG_TESTS_ABORT, wait
from reference import assert_same_bits
from trainers import state_of

pytestmark = [HUNG_TESTS_ABORT, pytest.mark.usefixtures("own_handlers")]

STEPS = 4


@pytest.fixture(scope="module")
def undisturbed():
    return undisturbed_course(STEPS)[0]


def saving(trainer, folder):
    """Have SIGTERM save; return the steps that were done when it came."""
    seen = []

    def save(number, frame):
        trainer.save(folder)
        seen.append(trainer.steps_done)

    signal.signal(signal.SIGTERM, save)
    return seen


def press():
    signal.raise_signal(signal.SIGTERM)


def resumed(folder, kind=Training):
    """Resume a training on one device, and train to the end; return its state."""
    training = kind(**QUICK)
    with training.load(folder) as trainer:
        training.run(STEPS)
        return state_of(trainer)


def train_and_save(kind, boundary, folder, undisturbed, **options):
    """Train with one signal, and resume what its handler saved; return the places passed."""
    training = kind(**{**QUICK, **options})
    saved = saving(training.trainer, folder)
    with training.trainer as trainer:
        with interrupted_at(boundary, press) as passed:
            training.run(STEPS)
        assert_same_bits(state_of(trainer), undisturbed[STEPS])
    if saved:
        assert_same_bits(resumed(folder, kind), undisturbed[STEPS])
    return passed


CASES = [
    *((Training, layout) for layout in LAYOUTS),
    *((InTwoCalls, layout) for layout in ("one", "two", "in flight")),
]


@pytest.mark.parametrize(("kind", "layout"), CASES)
@pytest.mark.thinned(2)
def test_in_steps(kind, layout, undisturbed, tmp_path):
    """Between backward and the update, a checkpoint is of the state before the backward pass."""
    for boundary in spread(CASES.index((kind, layout)), 3, 307, 5507):
        folder = tmp_path / str(boundary)
        passed = train_and_save(kind, boundary, folder, undisturbed, **LAYOUTS[layout])
        if len(passed) < boundary:
            break
        assert kind is InTwoCalls or len([*folder.iterdir()]) == 1
    assert boundary > 11321  # at least one was in time


def test_in_the_update_of_a_loop_it_waits_for_its_end(undisturbed, tmp_path):
    training = InTwoCalls(**QUICK)
    saved = saving(training.trainer, tmp_path)
    with training.trainer:
        training.run(1)
        early = training.optimizer.register_step_pre_hook(lambda *_: press())
        late = training.optimizer.register_step_pre_hook(lambda *_: saved.append("later"))
        training.run(2)
        early.remove()
        late.remove()
        assert saved == ["later", 2]
    assert_same_bits(resumed(tmp_path, InTwoCalls), undisturbed[STEPS])


def test_gradients_that_are_accumulated_are_not_lost(tmp_path):
    """A checkpoint between two backward passes of one update is of the state before both."""

    def train(trainer, until, act=lambda: None):
        while trainer.steps_done < until:
            number = trainer.steps_done
            generator = torch.Generator().manual_seed(number)
            X, y = torch.randn(8, 3, generator=generator), torch.arange(8) % 4
            trainer.backward(X, y, accumulate=number % 2 == 1)
            act()
            if number % 2:
                trainer.optimizer.step()

    with Training(**QUICK).trainer as whole:
        train(whole, 8)
    with Training(**QUICK).trainer as trainer:
        train(trainer, 4)
        trainer.backward(torch.ones(8, 3), torch.zeros(8).long())
        kept = state_of(trainer)
        trainer.save(tmp_path)
        assert_same_bits(state_of(trainer), kept)
        assert trainer.steps_done == 5
    with Training(**QUICK).load(tmp_path) as again:
        assert again.steps_done == 4
        train(again, 8)
        assert_same_bits(state_of(again), state_of(whole))


def test_an_update_by_hand_uses_the_gradients(tmp_path):
    """Torch's hooks don't see it; the parameters have changed."""
    training = Training(**QUICK)
    with training.trainer as trainer:
        trainer.backward(torch.ones(8, 3), torch.zeros(8).long())
        for parameter in trainer.model.parameters():
            parameter.data.sub_(parameter.grad, alpha=0.1)
        trainer.save(tmp_path)
        state = state_of(trainer)
    again = Training(**QUICK).load(tmp_path)
    assert again.steps_done == 1
    assert_same_bits(state_of(again), state)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("call", ["evaluate", "another model", "predict", "save", "close"])
@pytest.mark.thinned(2)
def test_in_other_calls(call, devices, undisturbed, tmp_path):
    training = Training(devices, **QUICK)
    trainer, make_call = training.trainer, training.calls(tmp_path / "own")[call]
    saved = saving(trainer, tmp_path / "saved")
    with trainer:
        training.run(2)
        expected = None if call == "close" else make_call()
        for boundary in itertools.chain([53], spread(devices, 2, 2056, 2003)):
            with interrupted_at(boundary, press) as passed:
                assert make_call() == expected
            if call == "close" and not trainer.steps_done % 2:
                trainer.open()
            if len(passed) < boundary:
                break
            assert saved.pop() == 2
            assert_same_bits(state_of(trainer), undisturbed[2])
            assert_same_bits(resumed(tmp_path / "saved"), undisturbed[STEPS])
    assert boundary > 2000


def test_a_step_of_lbfgs_ends_before_the_handler_runs(tmp_path):
    def made(make=evenstep.Trainer, *folder):
        torch.manual_seed(0)
        model = nn.Linear(3, 4)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
        return make(*folder, model, optimizer, nn.CrossEntropyLoss(), **grouped(devices=1, **QUICK))

    X, y = torch.randn(8, 3, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 4
    with made() as whole:
        for _ in range(3):
            whole.step(X, y)
    for boundary in range(1500, 9000, 2500):
        with made() as trainer:
            saved = saving(trainer, tmp_path / str(boundary))
            with interrupted_at(boundary, press):
                for _ in range(3):
                    trainer.step(X, y)
        with made(evenstep.Trainer.load, tmp_path / str(boundary)) as again:
            assert again.steps_done == saved[0]
            while again.steps_done < 3:
                again.step(X, y)
        assert again.fingerprint() == whole.fingerprint()


class Drawing(torch.utils.data.Dataset):
    """Draws from all default generators, and has a signal sent in the middle of an example."""

    def __init__(self, press_at):
        self.press_at = press_at

    def __len__(self):
        return 16

    def __getitem__(self, number):
        drawn = random.random() + np.random.rand()
        if number == self.press_at:
            self.press_at = None
            press()
        return torch.rand(3) + drawn, number % 4


class DrawingOrder(torch.utils.data.Sampler):
    """Draws an order, and has a signal sent in the middle of it."""

    def __init__(self, press_at):
        self.press_at = press_at

    def __len__(self):
        return 16

    def __iter__(self):
        for place, number in enumerate(torch.randperm(16).tolist()):
            if place == self.press_at:
                self.press_at = None
                random.random()
                press()
            yield number


def one_at_a_time(press_at):
    return Loader(Drawing(press_at), 8, seed=3)


def in_an_order(press_at):
    return torch.utils.data.DataLoader(Drawing(None), 8, sampler=DrawingOrder(press_at))


@pytest.mark.parametrize("made", [one_at_a_time, in_an_order])
@pytest.mark.parametrize("press_at", [0, 5, 15])
def test_generators_are_saved_as_the_user_left_them(made, press_at, tmp_path):
    """Also while evenstep lends them to code that draws data."""
    states, left = GeneratorStates(), []

    def save(number, frame):
        trainer.save(tmp_path)
        left.append(random.getstate())

    signal.signal(signal.SIGTERM, save)
    training = Training(**QUICK, state={"random": states})
    with training.trainer as trainer:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(5)
        expected = states.state_dict()
        for batch in trainer.epoch(made(press_at)):
            assert_same_bits(flat(states.state_dict()), flat(expected))
            trainer.step(*batch)
    assert left
    assert left[0] != expected["python"]  # they were lent when the handler ran
    random.seed(6)
    training.load(tmp_path, state={"random": states})
    assert_same_bits(flat(states.state_dict()), flat(expected))


def flat(states):
    return {**states, "numpy": str(states["numpy"])}


# ---- what else a handler may call


def calls_of(trainer):
    X, y = torch.ones(8, 3), torch.zeros(8).long()
    metrics = {"mean": lambda output, y: (output.sum(), len(y))}
    return {
        "step": lambda: trainer.step(X, y),
        "backward": lambda: trainer.backward(X, y),
        "evaluate": lambda: trainer.evaluate([(X, y)] * 2, metrics),
        "predict": lambda: trainer.predict([(X, y)]),
        "epoch": lambda: next(trainer.epoch([(X, y)])),
        "close": trainer.close,
        "open": trainer.open,
    }


@pytest.mark.parametrize("call", ["step", "backward", "evaluate", "predict", "epoch", "close"])
@pytest.mark.parametrize("within", ["step", "backward", "evaluate"])
@pytest.mark.thinned(2)
def test_other_calls_are_refused_by_name_in_the_middle_of_one(call, within):
    """The signal comes while a shard is computed, which ends only after the handler."""
    training = Training(**QUICK)
    refused, has_run = [], threading.Event()
    with training.trainer as trainer:
        training.run(1)
        calls = calls_of(trainer)
        within_now = calls[within]
        expected = state_of(trainer)

        def act(number, frame):
            try:
                with pytest.raises(
                    InputError, match=f"called {call} in the middle of {within}: set"
                ):
                    calls[call]()
                refused.append(call)
            finally:
                has_run.set()

        def press_and_wait(*_):
            if not has_run.is_set():
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
                wait(has_run)

        signal.signal(signal.SIGUSR1, act)
        trainer.model.register_forward_pre_hook(press_and_wait)
        within_now()
        assert refused == [call]
        if within == "evaluate":
            assert_same_bits(state_of(trainer), expected)


@pytest.mark.parametrize("call", ["step", "backward", "evaluate", "predict", "close"])
def test_between_calls_a_handler_may_call_everything(call):
    training = Training(**QUICK)
    made = []
    with training.trainer as trainer:
        training.run(1)
        act = calls_of(trainer)[call]
        signal.signal(signal.SIGUSR1, lambda number, frame: made.append([act()]))
        signal.raise_signal(signal.SIGUSR1)
    assert len(made) == 1


@pytest.mark.parametrize("layout", ["two", "in flight"])
def test_waiting_and_fingerprints_in_the_middle_of_a_step(layout, undisturbed):
    for boundary in itertools.count(401, 4001):
        training, seen = Training(**{**QUICK, **LAYOUTS[layout]}), []
        trainer = training.trainer

        def act(number, frame, trainer=trainer, seen=seen):
            trainer.waitall()
            seen.append((trainer.steps_done, trainer.fingerprint(), state_of(trainer)))

        signal.signal(signal.SIGTERM, act)
        with trainer:
            with interrupted_at(boundary, press) as passed:
                training.run(STEPS)
            assert_same_bits(state_of(trainer), undisturbed[STEPS])
        for steps, _, state in seen:
            assert_same_bits(state, undisturbed[steps])
        if len(passed) < boundary:
            break
    assert boundary > 5000


@TRACED
def test_with_several_processes_it_is_refused_and_they_stop_together(tmp_path):
    finished = launched(2, "handlers.py", tmp_path)
    assert finished.returncode == 0, finished.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["refused"] == []
    (refusal,) = second["refused"]
    assert "ask_to_stop" in refusal
    assert first["steps"] == second["steps"] > 0
    assert [one.name for one in (tmp_path / "checkpoints").iterdir()] == [first["path"]]


# ---- a program with real signals


def program():
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
    section = page.partition("## Before a job is preempted\n")[2].partition("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[0]


def run_program(folder, *, end_after_s=None):
    """Run the program of docs/clusters.md; return its lines."""
    source = str(Path(evenstep.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", program()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        lines = [process.stdout.readline()]
        if end_after_s is not None:
            try:
                process.wait(end_after_s)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
        lines += process.stdout.readlines()
        assert process.wait(40) == 0
    return lines


@pytest.mark.slow  # four processes
@pytest.mark.timeout(300)
def test_the_program_of_the_page_is_ended_by_real_signals(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "ended").mkdir()
    *_, expected = run_program(tmp_path / "whole")
    begun = [run_program(tmp_path / "ended", end_after_s=delay_s) for delay_s in (0.05, 0.5)]
    begun.append(run_program(tmp_path / "ended"))
    from_steps = [int(lines[0].split()[-1]) for lines in begun]
    assert from_steps == sorted(from_steps)
    assert any(0 < step < 3 * 256 for step in from_steps)  # in the middle, and on from there
    assert begun[-1][-1] == expected
