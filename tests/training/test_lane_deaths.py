"""A lane that ends while a trainer is open: training goes on without its device, or is refused."""

import logging
import sys
import threading

import pytest

from dying import end_lane
from evenstep.errors import DeviceError, DeviceLostError
from evenstep.metrics import accuracy
from layouts import own, shared
from patience import HUNG_TESTS_ABORT, wait_until
from reference import assert_same_bits
from trainers import open_trainer, state_of
from zoo import build, make_batches

pytestmark = HUNG_TESTS_ABORT

BATCHES = make_batches((24, 17, 24, 24))

CALLS = {
    "step": lambda trainer: trainer.step(*BATCHES[1]).item(),
    "evaluate": lambda trainer: trainer.evaluate([BATCHES[1]], {"accuracy": accuracy}),
}


flights = pytest.mark.parametrize("max_in_flight", [1, 2])


def trained(devices, act=lambda trainer, number: None, **options):
    with open_trainer(build("batch_norm"), devices=devices, **options) as trainer:
        for number, batch in enumerate(BATCHES):
            act(trainer, number)
            trainer.step(*batch)
        trainer.waitall()
        return state_of(trainer)


@flights
@pytest.mark.parametrize("devices", [shared(2), own(2)], ids=["shared", "own"])
def test_training_goes_on_without_a_device_whose_lane_has_ended(devices, max_in_flight, caplog):
    def act(trainer, number):
        if number == 2:
            trainer.waitall()  # else the lane might end inside the model: the user's own sys.exit()
            end_lane(trainer._engine, 1)

    with caplog.at_level(logging.WARNING, "evenstep"):
        state = trained(devices, act, max_in_flight=max_in_flight)
    assert_same_bits(state, trained(1))
    (line,) = [record.message for record in caplog.records if "was lost" in record.message]
    assert line.startswith(f"{devices[1]} was lost in step ")


@pytest.mark.parametrize("devices", [shared(2), own(2)], ids=["shared", "own"])
def test_a_lane_that_ended_between_two_steps_is_named_too(devices, caplog):
    def act(trainer, number):
        if number == 2:
            trainer._engine.lanes.put(1, lambda lane: sys.exit())
            wait_until(lambda: trainer._engine.lost_lanes)

    with caplog.at_level(logging.WARNING, "evenstep"):
        state = trained(devices, act)
    assert_same_bits(state, trained(1))
    (line,) = [record.message for record in caplog.records if "was lost" in record.message]
    assert line.startswith(f"{devices[1]} was lost before step 2 (its thread ended)")


@flights
@pytest.mark.parametrize("waiting", ["step", "evaluate"])
def test_without_any_device_every_call_says_why_and_nothing_hangs(max_in_flight, waiting):
    with open_trainer(build("convolution"), devices=1, max_in_flight=max_in_flight) as trainer:
        trainer.step(*BATCHES[0])
        trainer.waitall()
        before = trainer.fingerprint()
        end_lane(trainer._engine, 0)
        for _ in range(2):
            with pytest.raises(DeviceLostError, match="cpu:0 was lost") as caught:
                CALLS[waiting](trainer)
            assert isinstance(caught.value.__cause__, SystemExit)
        assert trainer.fingerprint() == before
        assert trainer.steps_done == 1


@pytest.mark.parametrize("waiting", ["step", "evaluate"])
def test_shards_side_by_side_do_not_wait_for_a_lane_that_has_ended(waiting):
    with open_trainer(build("convolution"), side_by_side=True) as trainer:
        trainer.step(*BATCHES[0])
        end_lane(trainer._engine, 1)
        with pytest.raises(DeviceLostError, match="cpu:1 was lost") as caught:
            CALLS[waiting](trainer)
        assert isinstance(caught.value.__cause__, SystemExit)


def test_shards_side_by_side_that_get_no_thread_do_not_wait_for_each_other(monkeypatch):
    with open_trainer(build("convolution"), side_by_side=True) as trainer:
        trainer.step(*BATCHES[0])
        before, start, asked = trainer.fingerprint(), threading.Thread.start, []

        def start_some(thread):
            asked.append(thread)
            if len(asked) == 6:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_some)
        with pytest.raises(DeviceError, match="could not get a thread .*can't start new thread"):
            trainer.step(*BATCHES[1])
        monkeypatch.undo()
        assert trainer.fingerprint() == before
        trainer.step(*BATCHES[1])


# ---- exceptions that refuse what is done with exceptions
