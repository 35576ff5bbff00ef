"""A small training that is interrupted, and its undisturbed course, to be compared with."""

import contextlib
import ctypes
import dis
import functools
import gc
import itertools
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import evenstep
from evenstep.data import Cursor, Loader
from grouping import grouped
from layouts import own
from reference import assert_same_bits
from trainers import state_of

TRACED = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11),
    # Python 3.10 has other opcodes; 3.12 traces those of a function from its second call on
    reason="the bytecode of Python 3.11 is traced",
)
CODE = (str(Path(evenstep.__file__).parent), threading.__file__, contextlib.__file__)
BATCHES = 3  # in an epoch
CLASSES = 4
QUICK = {"check": "off", "tune_malloc": False}
LAYOUTS = {
    "one": {},
    "two": {"devices": 2},
    "own": {"devices": own(2)},
    "in flight": {"devices": 2, "max_in_flight": 2},
    "own in flight": {"devices": own(2), "max_in_flight": 2},
    "stages": {"devices": 2, "divide": evenstep.Stages("balanced")},
    "owners": {"devices": 2, "divide": evenstep.Owners()},
    "owners in flight": {"devices": 2, "divide": evenstep.Owners(), "max_in_flight": 2},
    "checked": {"check": "first"},
}


class Busy(nn.Module):
    """Draws random numbers, writes buffers in place, and assigns one."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(3, 6), nn.BatchNorm1d(6)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(6, CLASSES)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        x = self.inner(x)
        if self.training:
            self.mean = 0.9 * self.mean + x.detach().mean(0)
        return self.head(self.drop(self.norm(x) - self.mean))


def loader():
    generator = torch.Generator().manual_seed(1)
    X = torch.randn(8 * BATCHES - 3, 3, generator=generator)
    y = torch.randint(CLASSES, (len(X),), generator=generator)
    return Loader(torch.utils.data.TensorDataset(X, y), 8, seed=3)


class Training:
    """A trainer, and a loop that asks the trainer where it stands.

    Attributes:
        losses: by step, as far as the loop has got them.
    """

    def __init__(self, devices=1, max_in_flight=1, **options):
        torch.manual_seed(0)
        model = Busy()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        options = {"shards": 2, "devices": devices, "max_in_flight": max_in_flight, **options}
        self.trainer = evenstep.Trainer(
            model, self.optimizer, nn.CrossEntropyLoss(), **grouped(**options)
        )
        self.loader = loader()
        self.losses = {}

    def load(self, folder, **options):
        """Make the trainer a resumed one, on one device; return it."""
        given = self.trainer.model, self.optimizer, nn.CrossEntropyLoss()
        self.trainer = evenstep.Trainer.load(folder, *given, devices=1, **options)
        return self.trainer

    def calls(self, folder):
        """Return calls beside the steps, by name."""
        trainer, other = self.trainer, Training().trainer.model
        metrics = {"mean": lambda output, y: (output.sum(), len(y))}
        return {
            "evaluate": lambda: trainer.evaluate(self.loader, metrics),
            "another model": lambda: trainer.evaluate(self.loader, metrics, model=other),
            "predict": lambda: trainer.predict(self.loader).sum().item(),
            "waitall": trainer.waitall,
            "save": lambda: trainer.save(folder),
            "close": trainer.close,
        }

    def take(self, batch):
        """Take a step on a batch; return its loss."""
        return self.trainer.step(*batch)

    def run(self, until):
        """Train until `until` steps are done, each with a rate of its own."""
        trainer = self.trainer
        while trainer.steps_done < until:
            for batch in trainer.epoch(self.loader):
                step = trainer.steps_done
                self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + step % 5)
                self.losses[step] = self.take(batch)
                if step - 1 in self.losses:
                    self.losses[step - 1] = float(self.losses[step - 1])
                if trainer.steps_done >= until:
                    break
        trainer.waitall()

    def assert_is_at_a_step_of(self, undisturbed):
        """The model is as after the step that the trainer names."""
        trainer = self.trainer
        trainer.waitall()
        assert cursor_of(trainer.steps_done) == trainer.cursor or (
            # the end of an epoch counts as soon as the next one is begun
            trainer.cursor == Cursor((trainer.steps_done - 1) // BATCHES, BATCHES)
            and trainer.steps_done % BATCHES == 0
        )
        assert_same_bits(state_of(trainer), undisturbed[trainer.steps_done])


class InTwoCalls(Training):
    """Takes each step by `backward`, and an update of its own."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.left = None  # the number of a step whose update was not made yet
        self.optimizer.register_step_post_hook(self._note_update)

    def _note_update(self, *_):
        self.left = None

    def take(self, batch):
        self.left = self.trainer.steps_done
        loss = self.trainer.backward(*batch)
        self.optimizer.step()
        return loss

    def update_if_left(self):
        """Make the update if an interrupt came behind the backward pass and before the update."""
        if self.left is not None and self.trainer.steps_done > self.left:
            self.optimizer.step()


def cursor_of(steps_done):
    return Cursor(*divmod(steps_done, BATCHES))


def undisturbed_course(steps):
    """Return the state after each number of steps, and the losses."""
    training, states = Training(), {}
    with training.trainer as trainer:
        for step in range(steps + 1):
            training.run(step)
            states[step] = state_of(trainer)
    return states, {step: float(loss) for step, loss in training.losses.items()}


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)


class OutsideError(Exception):
    """Thrown into the main thread from outside, as notebooks and test runners end what is late."""


@contextlib.contextmanager
def thrown_after(delay_s):
    """Inside `with`, throw an error into the main thread from another one, later.

    At the end of the block it has been thrown, or never will be: it can't escape into other code.
    Nothing is collected meanwhile: Python drops what is raised in a callback of the collector, and
    hypothesis has one.
    """
    collects = gc.isenabled()
    gc.disable()
    main = ctypes.c_ulong(threading.main_thread().ident)
    throw = functools.partial(ctypes.pythonapi.PyThreadState_SetAsyncExc, main)
    timer = threading.Timer(delay_s, throw, [ctypes.py_object(OutsideError)])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        try:
            _wait_for_end(timer)  # one that was thrown is raised here at the latest
        finally:
            if collects:
                gc.enable()


def _wait_for_end(thread):
    """Join a thread, even if it throws an error into this one meanwhile."""
    try:
        thread.join()
    except OutsideError:
        thread.join()
        raise


@contextlib.contextmanager
def thrown_at(boundary, functions=()):
    """Inside `with`, raise an error where Python would raise one that comes from outside.

    That is at the first such place from the given bytecode boundary on: where a function or another
    round of a loop begins, and behind a call. Yields a list as `interrupted_at` does.

    Where parts of names of functions are given, such places in these alone are counted.
    """
    _skip_other_bytecode()
    passed, last = [], None

    def trace(frame, event, argument):
        nonlocal last
        if not frame.f_code.co_filename.startswith(CODE):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            name = _opcode_at(frame.f_code, frame.f_lasti)
            is_behind_call = last is not None and last[0] is frame and last[1] in _CALLS
            is_place = name in _CHECKED or is_behind_call
            last = frame, name
            function = frame.f_code.co_qualname
            if not functions or (is_place and any(one in function for one in functions)):
                passed.append((function, frame.f_lineno))
                if len(passed) >= boundary and is_place:
                    raise OutsideError
        return trace

    sys.settrace(trace)
    try:
        yield passed
    finally:
        sys.settrace(None)


def _skip_other_bytecode():
    if TRACED.args[0]:
        pytest.skip(TRACED.kwargs["reason"])


_CHECKED = {"RESUME", "JUMP_BACKWARD"}
_CALLS = {"CALL", "CALL_KW", "CALL_FUNCTION_EX"}


@functools.cache
def _names_of(code):
    return {one.offset: one.opname for one in dis.get_instructions(code)}


def _opcode_at(code, offset):
    return _names_of(code).get(offset, "")


def interrupting(act, boundary):
    """Return what lets `act` happen at a boundary: `press_ctrl_c`, or "throw"."""
    if act == "throw":
        return thrown_at(boundary)
    return interrupted_at(boundary, act)


@contextlib.contextmanager
def interrupted_at(boundary, act=press_ctrl_c):
    """Inside `with`, call `act` at the given bytecode boundary of evenstep, or of Python's locks.

    Yields a list: of the boundaries that were passed, each with its function and line.
    """
    _skip_other_bytecode()
    passed = []

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.startswith(CODE):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            passed.append((frame.f_code.co_qualname, frame.f_lineno))
            if len(passed) == boundary:
                act()
        return trace

    sys.settrace(trace)
    try:
        yield passed
    finally:
        sys.settrace(None)


def spread(number, of, first, stride):
    """Return boundaries for one of several cases, which all together try every `stride`-th one."""
    return itertools.count(first + number % of * stride, of * stride)


def lanes_left():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("evenstep")]
