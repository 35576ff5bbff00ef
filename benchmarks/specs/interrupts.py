"""Interrupts trainings at random moments, and lets each go on to its end.

Each training is interrupted once in the middle of its steps: by Ctrl-C, by SIGTERM whose handler
saves, or by an exception that is thrown into the thread from outside. The loop catches what is
raised, and goes on where the trainer says that it stands. The training has held if nothing else was
raised, `cursor` is at the step that `steps_done` names, and losses and fingerprint are those of a
training that was not interrupted; and so are those of a training that resumes from what the handler
has saved. Dropout, BatchNorm, an assigned buffer and a rate that changes with every step make a
step that is lost, taken twice or half done visible.
"""

from __future__ import annotations

import ctypes
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import evenstep
from benchmark import Benchmark, script
from evenstep.bench import fresh
from evenstep.bench.tables import Table
from evenstep.data import Cursor, Loader

STEPS, INTERRUPTS, BATCHES = 24, 50, 5
LAYOUTS = {"one device": 1, "two devices": 2, "own memory": ["cpu:0:own", "cpu:1:own"]}
MORE = {
    "one device": {"devices": 1},
    "two devices": {"devices": 2},
    "two in flight": {"devices": 2, "max_in_flight": 2},
    "own memory, two in flight": {"devices": ["cpu:0:own", "cpu:1:own"], "max_in_flight": 2},
    "stages": {"devices": 2, "stages": "balanced"},
    "owners": {"devices": 2, "owners": True},
}
ACTS = {"save": "a handler that saves", "throw": "an exception from outside"}


class OutsideError(Exception):
    """Thrown into the thread that trains."""


class Model(nn.Module):
    """Draws random numbers, writes buffers, and assigns one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of four classes."""
        x = self.inner(x)
        if self.training:
            self.mean = 0.9 * self.mean + x.detach().mean(0)
        scores: torch.Tensor = self.head(self.drop(self.norm(x) - self.mean))
        return scores


class Training:
    """A training, and how it stands.

    Attributes:
        losses: the loss of each step, as far as its handle was returned.
        wrong: what was found to be wrong.
    """

    def __init__(self, options: Mapping[str, Any], *, in_two_calls: bool = False) -> None:
        torch.manual_seed(0)
        model = Model()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.given = model, self.optimizer, nn.CrossEntropyLoss()
        self.trainer = evenstep.Trainer(*self.given, **options)
        self._in_two_calls = in_two_calls
        self._left: int | None = None  # the number of a step whose update was not made yet
        if self._in_two_calls:
            self.optimizer.register_step_post_hook(self._note_update)
        data = torch.randn(16 * BATCHES, 8), torch.arange(16 * BATCHES) % 4
        self.loader = Loader(TensorDataset(*data), 16)
        self.losses: dict[int, Any] = {}
        self.wrong = ""

    def run(self) -> None:
        """Train to the end, from where the trainer stands."""
        trainer = self.trainer
        if self._left is not None and trainer.steps_done > self._left:
            self.optimizer.step()  # the interrupt came between the two calls
        while trainer.steps_done < STEPS:
            for batch in trainer.epoch(self.loader):
                self._look()
                self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + trainer.steps_done % 7)
                self.losses[trainer.steps_done] = self._take(batch)
                if trainer.steps_done == STEPS:
                    break
        trainer.waitall()

    def _take(self, batch: Any) -> Any:
        if not self._in_two_calls:
            return self.trainer.step(*batch)
        self._left = self.trainer.steps_done
        loss = self.trainer.backward(*batch)
        self.optimizer.step()
        return loss

    def _note_update(self, *_: object) -> None:
        self._left = None

    def _look(self) -> None:
        cursor, steps_done = self.trainer.cursor, self.trainer.steps_done
        if cursor != Cursor(*divmod(steps_done, BATCHES)):
            self.wrong = f"{cursor} after {steps_done} steps"

    def outcome(self) -> tuple[str, dict[int, float]]:
        """Return the fingerprint and the losses."""
        return self.trainer.fingerprint(), {step: float(x) for step, x in self.losses.items()}


class Interrupt:
    """Interrupts once, after a random part of `within_s`, while `with` is open.

    Attributes:
        came: whether it was in time.
    """

    def __init__(self, act: str, within_s: float, save: Callable[[], object]) -> None:
        self._timer = threading.Timer(random.random() * within_s, self._act)
        self._number = signal.SIGTERM if act == "save" else signal.SIGINT
        self._throws, self._saves, self._save = act == "throw", act == "save", save
        self._lock, self._is_open, self.came = threading.Lock(), False, False
        self._main = threading.get_ident()

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(self._number, self._on_signal)
        self._is_open = True
        self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._is_open = False  # from here on it comes too late
        self._timer.cancel()
        self._timer.join()
        signal.signal(self._number, self._before)

    def _act(self) -> None:
        with self._lock:
            if not self._is_open:
                return
            if self._throws:
                self.came = True
                thread, error = ctypes.c_ulong(self._main), ctypes.py_object(OutsideError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, error)
            else:
                signal.pthread_kill(self._main, self._number)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._is_open and not self.came:
            self.came = True
            if not self._saves:
                raise KeyboardInterrupt
            self._save()


def interrupted(job: Mapping[str, Any], within_s: float, expected: Any, folder: Path) -> str:
    """Train once with one interrupt; return how it ended."""
    torch.manual_seed(1)
    in_two_calls, act = job.get("in_two_calls", False), job.get("act", "press")
    training = Training(options_of(job), in_two_calls=in_two_calls)
    with training.trainer:
        try:
            with Interrupt(act, within_s, lambda: training.trainer.save(folder)) as interrupt:
                training.run()
        except (KeyboardInterrupt, OutsideError):
            pass
        except Exception as error:
            return f"wrong: {type(error).__name__}: {error}"
        training.run()
        wrong = differences(training, expected)
    if act == "save" and interrupt.came:
        resumed = Training({"devices": 1}, in_two_calls=in_two_calls)
        resumed.trainer = evenstep.Trainer.load(folder, *resumed.given, devices=1)
        with resumed.trainer:
            resumed.run()
            wrong = wrong or differences(resumed, expected)
    return wrong or ("held" if interrupt.came else "not interrupted")


def differences(training: Training, expected: Any) -> str:
    """Return what is wrong with a training that has ended."""
    fingerprint, losses = training.outcome()
    if training.wrong:
        return f"wrong: {training.wrong}"
    if fingerprint != expected[0]:
        return "wrong: another fingerprint"
    return "" if losses.items() <= expected[1].items() else "wrong: another loss"


def options_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a job's trainer."""
    names = ("devices", "max_in_flight")
    stages = [evenstep.Stages(job["stages"])] if "stages" in job else []
    divide = (*stages, *([evenstep.Owners()] if job.get("owners") else []))
    options = {name: job[name] for name in names if name in job}
    return {**options, "layout": evenstep.Layout(divide=divide)}


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Interrupt some trainings; return how many ended how, and the first that went wrong."""
    expected, within_s = None, 0.0
    for _ in range(3):  # the first one is slower
        undisturbed, began_s = Training(options_of(job)), time.monotonic()
        with undisturbed.trainer:
            undisturbed.run()
            within_s = time.monotonic() - began_s
            expected = undisturbed.outcome()
    ends = []
    for _ in range(job["interrupts"]):
        with tempfile.TemporaryDirectory() as folder:
            ends.append(interrupted(job, within_s, expected, Path(folder)))
    wrong = [end for end in ends if end.startswith("wrong")]
    return {"ends": Counter(end.partition(":")[0] for end in ends), "first": wrong[:3]}


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of interrupts."""
    rows = []
    for one in BENCHMARK.contenders:
        if runs := one.runs(document):
            held, wrong = (
                sum(run["ends"].get(end, 0) for run in runs) for end in ("held", "wrong")
            )
            rows.append([one.label, str(held + wrong), str(held)])
    return {"interrupts": Table(("training", "interrupted", "held"), rows)}


BENCHMARK = Benchmark(
    name="interrupts",
    rounds=20,
    settings={"steps": STEPS, "interrupts": INTERRUPTS},
    contenders=[
        script(
            "interrupts",
            f"{name.replace(' ', '_')}.{steps}",
            {"devices": devices, "max_in_flight": steps, "interrupts": INTERRUPTS},
            label=f"{name}, {steps} step{'s' * (steps > 1)} in flight",
        )
        for steps in (1, 2)
        for name, devices in LAYOUTS.items()
    ]
    + [
        script(
            "interrupts",
            f"{act}.{call}.{name.replace(' ', '_').replace(',', '')}",
            {**options, "act": act, "in_two_calls": call == "backward", "interrupts": INTERRUPTS},
            label=f"{name}: {what}, in loops with `{call}`",
        )
        for act, what in ACTS.items()
        for call in ("step", "backward")
        for name, options in MORE.items()
        if not (call == "backward" and name == "owners")
    ],
    tables=tables,
)

if __name__ == "__main__":
    fresh.answer(measure)
