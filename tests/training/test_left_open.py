"""Trainers and engines that are left open at the end of a program, or reached from a fork."""

import os
import signal
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import evenstep
from evenstep.data import Loader
from evenstep.engine import Engine
from evenstep.errors import ClosedError, DeadlockError
from evenstep.metrics import accuracy
from patience import HUNG_TESTS_ABORT
from reference import assert_same_bits
from trainers import open_trainer, state_of, take_steps
from warm import run
from zoo import build, make_batches

pytestmark = HUNG_TESTS_ABORT

BATCHES = make_batches((24, 17, 24))

flights = pytest.mark.parametrize("max_in_flight", [1, 2])


# ---- the end of the program


PROGRAM = """
import atexit, sys, threading, torch, evenstep
from torch import nn
updates = []
atexit.register(lambda: print(len(updates)))  # called after the trainer has ended
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 700), nn.Linear(700, 700), nn.Linear(700, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = torch.randn(2000, 4), torch.randint(0, 3, (2000,))
trainer = evenstep.Trainer(
    model, optimizer, nn.CrossEntropyLoss(), devices=2, max_in_flight={flight},
    after_update=updates.append,
).{open}()
trainer.step(*batch)
{end}
"""
AN_ENGINE = """
trainer.__exit__(None, None, None)
engine = evenstep.Engine(2).__enter__()
for _ in range(40): engine.submit(torch.mm, torch.ones(500, 500), torch.ones(500, 500))
"""
ENDS = [  # the end of a program, its exit code, and what it left open
    ("for _ in range(2): trainer.step(*batch)", 0, ["a trainer"]),
    ("trainer.step(*batch); sys.exit(3)", 3, ["a trainer"]),
    ("trainer.step(*batch); raise KeyError('mine')", 1, ["a trainer"]),
    (AN_ENGINE, 0, ["an engine"]),
    ("trainer.__exit__(None, None, None)", 0, []),
]
A_STEP = "trainer.step(*batch)\n"
OPENED = [  # the end of a program, its exit code, and what it prints
    ("", 0, "2"),
    ("trainer.waitall(); raise KeyError('mine')", 1, "2"),
    ("sys.exit(3)", 3, "2"),
    ("trainer.close(); trainer.close(); print(threading.active_count())", 0, "1 2"),
    ("del trainer", 0, "2"),
]


def first_is_fast(cases):
    """The others are slow: each starts a process."""
    first, *others = cases
    return [first, *(pytest.param(*case, marks=pytest.mark.slow) for case in others)]


def ended(**parts):
    finished = run("-c", PROGRAM.format(**parts))
    lines = [line for line in finished.stderr.splitlines() if "was still open" in line]
    assert "KeyError" in parts["end"] or finished.stderr.splitlines() == lines
    return finished, lines


@pytest.mark.timeout(90)  # a new process has to import torch
@pytest.mark.parametrize(
    ("end", "code", "left", "flight"),
    first_is_fast((*end, flight) for end in ENDS for flight in (2, 1)),
)
def test_a_program_that_leaves_a_trainer_open_ends_cleanly_with_one_line(end, code, left, flight):
    finished, lines = ended(open="__enter__", flight=flight, end=end)
    assert finished.returncode == code, finished.stderr
    assert lines == [
        f"{one} was still open when the program ended, so unfinished work was dropped: use it "
        f"inside `with`"
        for one in left
    ]


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("end", "code", "printed"), first_is_fast(OPENED))
def test_a_program_that_calls_open_needs_no_with_and_finishes_its_steps(end, code, printed):
    finished, lines = ended(open="open", flight=2, end=A_STEP + end)
    assert finished.returncode == code, finished.stderr
    assert finished.stdout.split() == printed.split()
    assert lines == []


def test_open_and_close_do_what_with_does():
    with open_trainer(build("convolution")) as trainer:
        trainer.step(*BATCHES[0])
        wanted = trainer.fingerprint()
    trainer = open_trainer(build("convolution"))
    assert trainer.open() is trainer
    trainer.step(*BATCHES[0])
    trainer.close()
    assert trainer.fingerprint() == wanted
    with pytest.raises(ClosedError, match="was closed"):
        trainer.step(*BATCHES[0])
    trainer.open().close()


# ---- a fork


def in_a_fork(check):
    """Call `check` in a forked child; it must return, and within the test's time."""
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(10)  # the default ends the process
            check()
            code = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


CALLS = {
    "step": lambda trainer: trainer.step(*BATCHES[0]),
    "backward": lambda trainer: trainer.backward(*BATCHES[0]),
    "waitall": lambda trainer: trainer.waitall(),
    "fingerprint": lambda trainer: trainer.fingerprint(),
    "save": lambda trainer: trainer.save("nowhere"),
    "wait_for_save": lambda trainer: trainer.wait_for_save(),
    "evaluate": lambda trainer: trainer.evaluate([BATCHES[0]], {"accuracy": accuracy}),
    "predict": lambda trainer: trainer.predict([BATCHES[0]]),
    "epoch": lambda trainer: next(trainer.epoch(Loader(TensorDataset(*BATCHES[0]), 8))),
    "batches": lambda trainer: next(trainer.batches(Loader(TensorDataset(*BATCHES[0]), 8))),
    "ask_to_stop": lambda trainer: trainer.ask_to_stop(),
    "should_stop": lambda trainer: trainer.should_stop,
    "trace": lambda trainer: trainer.trace,
    "shares": lambda trainer: trainer.shares(),
    "busy_s": lambda trainer: trainer.busy_s,
    "__enter__": lambda trainer: trainer.__enter__(),
    "open": lambda trainer: trainer.open(),
    "close": lambda trainer: trainer.close(),
}

PASSIVE = {"compile_s", "contract", "cursor", "exchanged", "hybridized", "load", "position"}
PASSIVE |= {"facts", "stages", "steps_done", "within_rounding"}
"""What needs no thread: it may be read in a fork too."""


def test_every_public_call_is_tried_in_a_fork():
    public = {name for name in vars(evenstep.Trainer) if not name.startswith("_")}
    assert public - PASSIVE == {*CALLS} - {"__enter__"}


@flights
def test_every_call_in_a_fork_is_refused_at_once(max_in_flight):
    def check():
        for name, call in CALLS.items():
            with pytest.raises(ClosedError, match="a trainer belongs to the process that opened"):
                call(trainer)
            assert name
        for name in PASSIVE - {"load"}:  # which only the class has
            getattr(trainer, name)
        trainer.__exit__(None, None, None)  # as at the end of `with`, in the child too

    with open_trainer(build("convolution"), max_in_flight=max_in_flight) as trainer:
        trainer.step(*BATCHES[0])
        trainer.step(*BATCHES[1])
        in_a_fork(check)
        trainer.step(*BATCHES[2])
        trainer.waitall()
        state = state_of(trainer)
    alone = open_trainer(build("convolution"), devices=1)
    assert_same_bits(state, take_steps(alone, BATCHES))


def test_an_engine_in_a_fork_is_refused_at_once():
    def check():
        assert done.result() == 0
        calls = (lambda: engine.submit(int), engine.waitall, lambda: engine.copy(1, "cpu:0"))
        for call in calls:
            with pytest.raises(ClosedError, match="an engine belongs to the process that opened"):
                call()
        with pytest.raises(ZeroDivisionError):
            failed.result()
        engine.close()

    with Engine(2) as engine:
        done, failed = engine.submit(int), engine.submit(lambda: 1 // 0)
        engine.wait_for(done.task)
        engine.wait_for(failed.task)
        in_a_fork(check)
        with pytest.raises(ZeroDivisionError):
            failed.result()


def test_a_trainer_that_was_not_opened_may_be_opened_in_a_fork():
    trainer = open_trainer(build("convolution"))

    def check():
        with trainer:
            trainer.step(*BATCHES[0])
            trainer.evaluate([BATCHES[0]], {"accuracy": accuracy})

    in_a_fork(check)
    with trainer:
        trainer.step(*BATCHES[0])


class Knows(Dataset):
    """Images that know a trainer, and draw random numbers in the workers."""

    def __init__(self):
        self.trainer = None
        self.images, self.labels = make_batches((48,))[0]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        torch.manual_seed(index)
        assert self.trainer.steps_done >= 0
        return self.images[index] + torch.rand(()), self.labels[index]


@flights
def test_workers_of_a_data_loader_fork_while_a_trainer_is_open(max_in_flight):
    def trained(workers):
        data = Knows()
        how = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        loaders = [Loader(data, 16, num_workers=workers), DataLoader(data, 16, **how)]
        with open_trainer(build("convolution"), max_in_flight=max_in_flight) as trainer:
            data.trainer = trainer
            trainer.step(*BATCHES[0])
            for batch in trainer.epoch(loaders[0]):
                trainer.step(*batch)
            for batch in loaders[1]:
                trainer.step(*batch)
            trainer.waitall()
            return state_of(trainer)

    assert_same_bits(trained(2), trained(0))


def test_a_worker_process_of_multiprocessing_ends(capfd):
    """It runs the functions registered for its end, which must not close the parent's trainer."""
    context = torch.multiprocessing.get_context("fork")
    with open_trainer(build("convolution"), max_in_flight=2) as trainer:
        trainer.step(*BATCHES[0])
        process = context.Process(target=int)
        process.start()
        process.join()
        assert process.exitcode == 0
        trainer.step(*BATCHES[1])
    assert "still open" not in capfd.readouterr().err


# ---- a task, or a hook, that waits for its own step


@flights
@pytest.mark.parametrize("call", ["step", "waitall", "fingerprint", "evaluate", "save"])
def test_a_hook_that_waits_for_its_own_step_is_refused(call, max_in_flight, tmp_path):
    def hook(module):
        if trainer.steps_done > 1:
            if call == "save":
                trainer.save(tmp_path)
            CALLS[call](trainer)

    model = build("convolution")
    options = {"after_update": hook, "max_in_flight": max_in_flight}
    with evenstep.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), **options
    ) as trainer:
        trainer.step(*BATCHES[0])
        trainer.waitall()
        with pytest.raises(DeadlockError):
            trainer.step(*BATCHES[1]).item()
