"""Errors that are no `Exception`, raised by user code while it is checked; `close` in a `with`."""

import threading

import pytest
import torch
from torch import nn

from reference import assert_same_bits
from trainers import open_trainer, state_of

X, Y = torch.arange(64.0 * 3).reshape(16, 3, 2, 2) / 192, torch.arange(16) % 4


class FailsOnce(nn.Module):
    """Raises an error in its first forward pass only, in any copy."""

    def __init__(self, error=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.first = First(error)

    def forward(self, x):
        self.first()
        return self.layers(x).mean((2, 3))


class First:
    def __init__(self, error):
        self.errors = [] if error is None else [error]
        self.lock = threading.Lock()

    def __call__(self):
        with self.lock:
            if self.errors:
                raise self.errors.pop()

    def __deepcopy__(self, memo):
        return self


@pytest.mark.parametrize("examples", [16, 9], ids=["the contract", "lone examples"])
@pytest.mark.parametrize(
    ("error", "max_in_flight"), [(SystemExit, 1), (KeyboardInterrupt, 2), (GeneratorExit, 1)]
)
def test_an_error_that_ends_programs_is_no_matter_of_a_check(error, max_in_flight, examples):
    """An `Exception` is left to the step, which meets it again; this one ends the program."""
    raised = error("enough")
    given = {"shards": 8, "max_in_flight": max_in_flight}
    batch = X[:examples], Y[:examples]
    with (
        open_trainer(FailsOnce(raised), **given) as trainer,
        open_trainer(FailsOnce(), **given) as undisturbed,
    ):
        before = state_of(trainer)
        with pytest.raises(error, match="enough") as caught:
            trainer.step(*batch)
        assert caught.value is raised
        assert trainer.steps_done == 0
        assert_same_bits(state_of(trainer), before)
        for one in (trainer, undisturbed):
            one.step(*batch)
            one.waitall()
        assert_same_bits(state_of(trainer), state_of(undisturbed))


# ---- closed before the end of the `with`


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt, SystemExit])
def test_an_error_after_close_in_the_with_arrives(error, max_in_flight):
    raised = error("mine")

    def close_and_fail():
        with open_trainer(FailsOnce(), max_in_flight=max_in_flight) as trainer:
            trainer.step(X, Y)
            trainer.close()
            raise raised

    with pytest.raises(error, match="mine") as caught:
        close_and_fail()
    assert caught.value is raised
    assert caught.value.__context__ is None


def test_the_end_of_a_with_after_close_does_nothing():
    trainer = open_trainer(FailsOnce())
    with trainer:
        trainer.step(X, Y)
        trainer.close()
    with trainer:
        trainer.step(X, Y)
    assert trainer.steps_done == 2
