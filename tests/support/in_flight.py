"""Training with a step held while the next one is submitted, to be compared with one at a time."""

import contextlib
import threading

import torch
from torch import nn

import evenstep
from evenstep.engine import ThreadLanes
from grouping import grouped
from layouts import own
from patience import wait
from reference import assert_same_bits, whole_state
from trainers import sgd
from zoo import build, make_batches

DEVICES = [1, 2, own(2)]


class Gates:
    """A loss for batches (X, y, number of the step) that holds the shards of chosen steps.

    Attributes:
        at_work: for each held step, set as soon as one of its shards is there.
        then: for each step, called by each of its shards.
    """

    def __init__(self):
        self.at_work = {}
        self.then = {}
        self._open = {}

    def __call__(self, output, y, number):
        number = int(number[0])
        if number in self._open:
            self.at_work[number].set()
            wait(self._open[number])
        if number in self.then:
            output = self.then[number](output)
        return nn.functional.cross_entropy(output, y)

    def hold(self, number):
        self.at_work[number], self._open[number] = threading.Event(), threading.Event()

    def release(self, number):
        if number in self._open:
            self._open[number].set()

    @contextlib.contextmanager
    def released_at_the_end(self):
        """Inside a trainer's `with`: a test that fails must not hang."""
        try:
            yield
        finally:
            for gate in self._open.values():
                gate.set()


class HeldCopies(ThreadLanes):
    """Lanes that copy only while `let_copy` is set.

    Attributes:
        copied: for each copy that was made, its lane.
    """

    def __init__(self, devices, let_copy):
        super().__init__(devices)
        self.copied = []
        self._let_copy = let_copy

    def put(self, lane, work):
        def held(lane):
            wait(self._let_copy)
            work(lane)
            self.copied.append(lane)

        super().put(lane, held if lane >= len(self.devices) else work)


def numbered(count, seed=1):
    """Return batches (X, y, number of the step)."""
    batches = make_batches([(24, 17, 24)[number % 3] for number in range(count)], seed)
    return [(X, y, torch.full((len(X),), number)) for number, (X, y) in enumerate(batches)]


@contextlib.contextmanager
def opened(
    devices,
    *,
    model="batch_norm",
    make_optimizer=sgd,
    make_scheduler=None,
    max_in_flight=2,
    **options,
):
    """Yield a trainer, and its loss: `Gates`."""
    model = build(model) if isinstance(model, str) else model()
    optimizer = make_optimizer(model)
    if make_scheduler:
        options["scheduler"] = make_scheduler(optimizer)
    options = {"check": "off", **options}  # a check computes shards, and would wait at the gates
    gates = Gates()
    with (
        evenstep.Trainer(
            model,
            optimizer,
            gates,
            **grouped(devices=devices, max_in_flight=max_in_flight, **options),
        ) as trainer,
        gates.released_at_the_end(),
    ):
        trainer.gates = gates
        yield trainer, gates


def train(devices, act, *, max_in_flight, steps=6, waits=False, **options):
    """Train, and call `act(trainer, number of the step, its loss)` after each step.

    With `max_in_flight=2` each step is held until the next one was submitted, or, where `act` or
    what it does `waits`, until `act` was called.

    Returns:
        (the whole state by name, losses, the optimizer's groups).
    """
    losses = []
    with opened(devices, max_in_flight=max_in_flight, **options) as (trainer, gates):
        for number, batch in enumerate(numbered(steps)):
            if max_in_flight > 1:
                gates.hold(number)
            losses.append(trainer.step(*batch))
            gates.release(number - 1)
            assert losses[-1]._step.finished == (max_in_flight == 1)
            if waits == "before":
                gates.release(number)
            act(trainer, number, losses[-1])
            if waits:
                gates.release(number)
        gates.release(steps - 1)
        trainer.waitall()
        return outcome(trainer), [float(loss) for loss in losses], groups(trainer.optimizer)


def outcome(trainer):
    """Return a copy of what training has made."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in whole_state(trainer.model, trainer.optimizer).items()
    }


def groups(optimizer):
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def assert_same_as_one_at_a_time(devices, act, **options):
    """Compare two in flight with one at a time on one device; return what the latter gave."""
    return assert_same_on([devices], act, **options)


def assert_same_on(sets, act, *, waits=False, **options):
    """Compare so on several sets of devices."""
    one = train(1, act, max_in_flight=1, **options)
    for devices in sets:
        two = train(devices, act, max_in_flight=2, waits=waits, **options)
        assert_same_bits(two[0], one[0])
        assert two[1:] == one[1:]
    return one
