"""Interrupts trainings at random moments, and lets each go on to its end.

Each training is interrupted once in the middle of its steps: by Ctrl-C, by SIGTERM whose handler
saves, or by an exception that is thrown into the thread from outside. The loop catches what is
raised, and goes on where the trainer says that it stands. The training has held if nothing else was
raised, `cursor` and the weights are at the step that `steps_done` names, and losses and weights end
as those of a training that was not interrupted; and so do those of a training that resumes from
what the handler has saved. Dropout, BatchNorm, an assigned buffer and a rate that changes with
every step make a step that is lost, taken twice or half done visible.
"""

from __future__ import annotations

import contextlib
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import evenstep
from benchmark import Benchmark, Contender, script
from evenstep.bench.tables import Table
from evenstep.errors import counted
from interrupting import InTwoCalls, OutsideError, Training, thrown_after, undisturbed_course
from reference import assert_same_bits
from trainers import state_of

STEPS, INTERRUPTS = 24, 50
OWN = ["cpu:0:own", "cpu:1:own"]
LAYOUTS: Mapping[str, dict[str, Any]] = {
    "one device": {"devices": 1},
    "two devices": {"devices": 2},
    "two in flight": {"devices": 2, "max_in_flight": 2},
    "own memory, two in flight": {"devices": OWN, "max_in_flight": 2},
    "stages": {"devices": 2, "divide": evenstep.Stages("balanced")},
    "owners": {"devices": 2, "divide": evenstep.Owners()},
}
PRESSED = {  # by Ctrl-C, with one step in flight and with two
    "one device": {"devices": 1},
    "two devices": {"devices": 2},
    "own memory": {"devices": OWN},
}
ACTS = {"save": "a handler that saves", "throw": "an exception from outside"}


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Interrupt some trainings; return how many ended how, and the first that went wrong."""
    course, within_s = undisturbed_course(STEPS), 0.0
    for _ in range(3):  # the first one is slower
        training, began_s = _training(job), time.monotonic()
        with training.trainer:
            training.run(STEPS)
            within_s = time.monotonic() - began_s
    ends = []
    for _ in range(job["interrupts"]):
        with tempfile.TemporaryDirectory() as folder:
            try:
                ends.append(interrupted(job, within_s, course, Path(folder)))
            except Exception as error:
                ends.append(f"wrong: {type(error).__name__}: {error}")
    wrong = [end for end in ends if end.startswith("wrong")]
    return {"ends": Counter(end.partition(":")[0] for end in ends), "first": wrong[:3]}


def interrupted(job: Mapping[str, Any], within_s: float, course: Any, folder: Path) -> str:
    """Train once with one interrupt; return how it ended.

    Raises:
        AssertionError: weights, losses or cursor are not those of the undisturbed course.
    """
    states, losses = course
    training, came = _training(job), list[object]()
    with training.trainer as trainer:
        with (
            contextlib.suppress(KeyboardInterrupt, OutsideError),
            _interrupting(job["act"], within_s, lambda: trainer.save(folder), came),
        ):
            training.run(STEPS)
        if isinstance(training, InTwoCalls):
            training.update_if_left()
        training.assert_is_at_a_step_of(states)
        training.run(STEPS)
        assert_same_bits(state_of(trainer), states[STEPS])
    found = {step: loss for step, loss in training.losses.items() if isinstance(loss, float)}
    assert found.items() <= losses.items()
    if job["act"] == "save" and came:
        resumed = _training({"layout": "one device", "in_two_calls": job["in_two_calls"]})
        with resumed.load(folder) as trainer:
            resumed.run(STEPS)
            assert_same_bits(state_of(trainer), states[STEPS])
    return "held" if came else "not interrupted"


def _training(job: Mapping[str, Any]) -> Training:
    kind = InTwoCalls if job["in_two_calls"] else Training
    return kind(**(LAYOUTS | PRESSED)[job["layout"]], **job.get("more", {}))


@contextlib.contextmanager
def _interrupting(
    act: str, within_s: float, save: Callable[[], object], came: list[object]
) -> Iterator[None]:
    """Inside `with`, let an interrupt come after a random part of `within_s`, and note it."""
    delay_s = random.random() * within_s
    if act == "throw":
        try:
            with thrown_after(delay_s):
                yield
        except OutsideError as error:
            came.append(error)
            raise
        return

    def handle(number: int, frame: object) -> None:
        came.append(number)
        if act == "press":
            raise KeyboardInterrupt
        save()

    number = signal.SIGTERM if act == "save" else signal.SIGINT
    before = signal.signal(number, handle)
    timer = threading.Timer(delay_s, signal.pthread_kill, [threading.get_ident(), number])
    timer.start()
    try:
        yield
    finally:
        try:
            timer.cancel()
            timer.join()
        finally:  # one that came just now was raised in the two lines above
            signal.signal(number, before)


def tables(document: Mapping[str, Any]) -> dict[str, Table]:
    """Return the table of interrupts."""
    rows = []
    for one, runs in BENCHMARK.measured(document):
        held, wrong = (sum(run["ends"].get(end, 0) for run in runs) for end in ("held", "wrong"))
        rows.append([one.label, str(held + wrong), str(held)])
    return {"interrupts": Table(("training", "interrupted", "held"), rows)}


def _contender(key: str, label: str, layout: str, call: str, act: str, **more: Any) -> Contender:
    job = {"layout": layout, "act": act, "in_two_calls": call == "backward", "more": more}
    key = key.replace(" ", "_").replace(",", "")
    return script("interrupts", key, {**job, "interrupts": INTERRUPTS}, label)


BENCHMARK = Benchmark(
    name="interrupts",
    rounds=20,
    settings={"steps": STEPS, "interrupts": INTERRUPTS},
    contenders=[
        *(
            _contender(
                f"{layout}.{steps}",
                f"{layout}, {counted(steps, 'step')} in flight",
                *(layout, "step", "press"),
                max_in_flight=steps,
            )
            for steps in (1, 2)
            for layout in PRESSED
        ),
        *(
            _contender(
                f"{act}.{call}.{layout}",
                f"{layout}: {what}, in loops with `{call}`",
                *(layout, call, act),
            )
            for act, what in ACTS.items()
            for call in ("step", "backward")
            for layout in LAYOUTS
            if (call, layout) != ("backward", "owners")
        ),
    ],
    tables=tables,
)
