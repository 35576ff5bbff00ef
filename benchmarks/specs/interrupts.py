"""Interrupts trainings by Ctrl-C at random moments, and lets each go on to its end.

Each training gets one SIGINT in the middle of its steps. The loop catches the KeyboardInterrupt and
goes on where the trainer says that it stands. The training has held if nothing else was raised,
`cursor` is at the step that `steps_done` names, and losses and fingerprint are those of a training
that was not interrupted. Dropout, BatchNorm, an assigned buffer and a rate that changes with every
step make a step that is lost, taken twice or half done visible.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
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

    def __init__(self, devices: Any, max_in_flight: int) -> None:
        torch.manual_seed(0)
        model = Model()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.trainer = evenstep.Trainer(
            model,
            self.optimizer,
            nn.CrossEntropyLoss(),
            devices=devices,
            max_in_flight=max_in_flight,
        )
        data = torch.randn(16 * BATCHES, 8), torch.arange(16 * BATCHES) % 4
        self.loader = Loader(TensorDataset(*data), 16)
        self.losses: dict[int, Any] = {}
        self.wrong = ""

    def run(self) -> None:
        """Train to the end, from where the trainer stands."""
        trainer = self.trainer
        while trainer.steps_done < STEPS:
            for batch in trainer.epoch(self.loader):
                self._look()
                self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + trainer.steps_done % 7)
                self.losses[trainer.steps_done] = trainer.step(*batch)
                if trainer.steps_done == STEPS:
                    break
        trainer.waitall()

    def _look(self) -> None:
        cursor, steps_done = self.trainer.cursor, self.trainer.steps_done
        if cursor != Cursor(*divmod(steps_done, BATCHES)):
            self.wrong = f"{cursor} after {steps_done} steps"

    def outcome(self) -> tuple[str, dict[int, float]]:
        """Return the fingerprint and the losses."""
        return self.trainer.fingerprint(), {step: float(x) for step, x in self.losses.items()}


class Press:
    """Presses Ctrl-C once, after a random part of `within_s`, while `with` is open."""

    def __init__(self, within_s: float) -> None:
        self._timer = threading.Timer(random.random() * within_s, self._press)
        self._is_open = False
        self.came = False

    def __enter__(self) -> Press:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        self._is_open = True
        self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_open = False  # from here on it comes too late
        self._timer.cancel()
        self._timer.join()
        signal.signal(signal.SIGINT, self._before)

    def _press(self) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._is_open and not self.came:
            self.came = True
            raise KeyboardInterrupt


def interrupted(job: Mapping[str, Any], within_s: float, expected: Any) -> str:
    """Train once with one interrupt; return how it ended."""
    torch.manual_seed(1)
    training, end = Training(job["devices"], job["max_in_flight"]), "not interrupted"
    with training.trainer:
        with Press(within_s):
            try:
                training.run()
            except KeyboardInterrupt:
                end = "held"
            except Exception as error:
                return f"wrong: {type(error).__name__}: {error}"
        training.run()
        fingerprint, losses = training.outcome()
    if training.wrong:
        return f"wrong: {training.wrong}"
    if fingerprint != expected[0]:
        return "wrong: another fingerprint"
    if not losses.items() <= expected[1].items():
        return "wrong: another loss"
    return end


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Interrupt some trainings; return how many ended how, and the first that went wrong."""
    expected, within_s = None, 0.0
    for _ in range(3):  # the first one is slower
        undisturbed, began_s = Training(job["devices"], job["max_in_flight"]), time.monotonic()
        with undisturbed.trainer:
            undisturbed.run()
            within_s = time.monotonic() - began_s
            expected = undisturbed.outcome()
    ends = [interrupted(job, within_s, expected) for _ in range(job["interrupts"])]
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
    ],
    tables=tables,
)

if __name__ == "__main__":
    fresh.answer(measure)
