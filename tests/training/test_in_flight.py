"""Two steps in flight: `step` returns at once, and the result is that of one at a time."""

import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import evenstep
from evenstep.data import Cursor, Loader
from evenstep.errors import NonFiniteLossError
from grouping import grouped
from in_flight import (
    DEVICES,
    HeldCopies,
    assert_same_on,
    groups,
    numbered,
    opened,
    outcome,
    train,
)
from layouts import own
from patience import wait, wait_until
from reference import assert_same_bits
from trainers import open_trainer, sgd
from zoo import build

on_devices = pytest.mark.parametrize("devices", DEVICES, ids=str)


# Returning at once


@on_devices
def test_a_step_returns_before_it_is_finished_and_its_loss_waits(devices):
    first, second = numbered(2)
    got = []
    with opened(devices) as (trainer, gates):
        gates.hold(0)
        assert not trainer.step(*first)._step.finished  # the first step of a trainer, too
        gates.release(0)
        gates.hold(1)
        loss = trainer.step(*second)
        wait(gates.at_work[1])
        assert trainer.steps_done == 2
        reader = threading.Thread(target=lambda: got.append(float(loss)))
        reader.start()
        assert reader.is_alive()
        assert not got
        gates.release(1)
        reader.join()
        assert got == [float(loss)]


@on_devices
def test_a_third_step_waits_for_the_first_of_the_two_in_flight(devices):
    batches = numbered(4)
    returned = threading.Event()
    with opened(devices) as (trainer, gates):
        trainer.step(*batches[0])
        gates.hold(1)
        trainer.step(*batches[1])
        gates.hold(2)
        trainer.step(*batches[2])
        assert len(trainer._pipeline.steps) == 2

        def third():
            trainer.step(*batches[3])
            returned.set()

        front_end = threading.Thread(target=third)
        front_end.start()
        wait(gates.at_work[1])
        assert not gates.at_work[2].is_set()
        assert not returned.is_set()
        assert trainer.steps_done == 3
        gates.release(1)
        wait(returned, gates.at_work[2])  # while the second is held
        assert len(trainer._pipeline.steps) == 2
        assert trainer.steps_done == 4
        gates.release(2)
        front_end.join()


@on_devices
def test_a_step_is_copied_while_the_one_before_computes(devices, monkeypatch):
    batches = numbered(3)
    copied = []
    carry = evenstep.options.experiment.carry

    def noted(tensor, *given):
        if tensor.dtype == torch.int64 and (tensor == 2).all():  # the number of the step
            copied.append(len(tensor))
        return carry(tensor, *given)

    monkeypatch.setattr("evenstep.options.experiment.carry", noted)
    batches[2][1].zero_()  # no target says 2
    with opened(devices, memory_format="channels_last") as (trainer, gates):
        trainer.step(*batches[0])
        gates.hold(1)
        trainer.step(*batches[1])
        wait(gates.at_work[1])
        copied.clear()  # shards of targets that are all 2
        gates.hold(2)
        trainer.step(*batches[2])
        wait_until(lambda: sum(copied) == len(batches[2][0]))
        assert not gates.at_work[2].is_set()
        gates.release(1)
        gates.release(2)
        trainer.waitall()


@pytest.mark.parametrize("name", ["batch_norm", "noisy", "recurrent", "branching"])
def test_the_result_is_that_of_one_at_a_time(name):
    assert_same_on(DEVICES, lambda *step: None, model=name)


# What waits for the steps in flight


def right(output, y, number):
    return (output.argmax(1) == y).sum(), len(y)


def outcome_after_waitall(trainer):
    trainer.waitall()
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in outcome(trainer).items()
    }


@pytest.mark.parametrize(
    "look",
    [
        lambda trainer, folder: trainer.fingerprint(),
        lambda trainer, folder: trainer.evaluate(numbered(2), {"right": right}),
        lambda trainer, folder: trainer.save(folder).name,
        lambda trainer, folder: outcome_after_waitall(trainer),
    ],
)
def test_looking_at_the_model_in_the_middle_of_steps_in_flight(look, tmp_path):
    def looks(devices, max_in_flight):
        found = []

        def act(trainer, number, loss):
            if number in (1, 3):
                found.append(look(trainer, tmp_path / f"{max_in_flight}"))

        state, *rest = train(devices, act, max_in_flight=max_in_flight, waits="before")
        return found, rest, state

    one = looks(1, 1)
    for devices in DEVICES:
        two = looks(devices, 2)
        assert two[:2] == one[:2]
        assert_same_bits(two[2], one[2])


def test_a_checkpoint_waits_for_the_steps_in_flight(tmp_path):
    def slow(model, X, y, _):
        time.sleep(0.5)  # longer than it takes to save
        return nn.functional.cross_entropy(model(X), y, reduction="sum"), len(y)

    options = grouped(devices=2, shards=2, max_in_flight=2, check="off")
    model = build("convolution")
    with evenstep.Trainer(model, sgd(model), objective=slow, **options) as trainer:
        for batch in numbered(2):
            trainer.step(*batch)
        trainer.save(tmp_path)
        trainer.waitall()
        expected = trainer.fingerprint()
    model = build("convolution", seed=1)
    loaded = evenstep.Trainer.load(tmp_path, model, sgd(model), objective=slow, max_in_flight=2)
    assert loaded.steps_done == 2
    assert loaded.fingerprint() == expected


def test_epochs_with_a_step_in_flight_at_their_end():
    X, y, _ = numbered(1)[0]
    dataset = torch.utils.data.TensorDataset(X, y)

    def run(devices, max_in_flight):
        places, options = [], {"shards": 2, "devices": devices, "max_in_flight": max_in_flight}
        with open_trainer(build("batch_norm"), **options) as trainer:
            for _ in range(2):
                for batch in trainer.epoch(Loader(dataset, 8)):
                    places.append(trainer.cursor)
                    trainer.step(*batch)
                assert len(trainer._pipeline.steps) == (0 if max_in_flight == 1 else 2)
            assert trainer.cursor == Cursor(2, 0)
            return places, trainer.fingerprint()

    assert run(1, 1) == run(1, 2) == run(2, 2) == run(own(2), 2)


def test_lbfgs_with_a_scheduler():
    def make_optimizer(model):
        return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def run(devices, max_in_flight):
        with opened(
            devices, make_optimizer=make_optimizer, max_in_flight=max_in_flight,
            make_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        ) as (trainer, _):  # fmt: skip
            losses = []
            for batch in numbered(3):
                losses.append(float(trainer.step(*batch)))
                trainer.scheduler.step()
            return losses, trainer.fingerprint(), groups(trainer.optimizer)

    one = run(1, 1)
    for devices, max_in_flight in ((2, 1), (own(2), 1), (1, 2), (2, 2), (own(2), 2)):
        assert run(devices, max_in_flight) == one


# Leaving


@on_devices
def test_leaving_by_an_exception_drops_what_is_in_flight(devices):
    batches = numbered(3)
    with (  # noqa: PT012
        pytest.raises(KeyError, match="the user's"),
        opened(devices) as (trainer, gates),
    ):
        first = trainer.step(*batches[0])
        trainer.waitall()
        before = outcome(trainer)
        gates.hold(1)
        loss = trainer.step(*batches[1])
        later = trainer.step(*batches[2])
        wait(gates.at_work[1])
        # The gate opens at the end of `opened`, before the trainer is left: so that the drop
        # comes first, the shards wait for it.
        attempt = trainer._pipeline.steps[0].attempt
        gates.then[1] = lambda output: (wait_until(lambda: attempt.ending.dropped), output)[1]
        raise KeyError("the user's")
    assert float(first) > 0
    assert_same_bits(outcome(trainer), before)
    assert trainer.steps_done == 1
    for handle in (loss, later):
        with pytest.raises(KeyError):
            float(handle)


@on_devices
def test_leaving_raises_the_error_that_nobody_waited_for(devices):
    batches = numbered(2)
    with (  # noqa: PT012
        pytest.raises(NonFiniteLossError, match="step 1 "),
        opened(devices) as (trainer, gates),
    ):
        trainer.step(*batches[0])
        trainer.waitall()
        before = outcome(trainer)
        gates.then[1] = lambda output: output * torch.nan
        trainer.step(*batches[1])
    assert_same_bits(outcome(trainer), before)
    assert trainer.steps_done == 1


# Memory


@pytest.fixture
def small_heap():
    """Leave what there is out of garbage collections, which would take a second each."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("small_heap")
@on_devices
def test_no_more_than_two_batches_are_alive_though_every_loss_is_kept(devices):
    refs, losses = [], []
    with opened(devices) as (trainer, gates):
        for number in range(6):
            if number:
                gates.hold(number)
            batch = [tensor.clone() for tensor in numbered(number + 1)[number]]
            refs.append([weakref.ref(tensor) for tensor in batch])
            losses.append(trainer.step(*batch))
            del batch
            gates.release(number - 1)
            gc.collect()
            wait_until(lambda: sum(any(ref() is not None for ref in refs_) for refs_ in refs) <= 2)
        gates.release(5)
        trainer.waitall()
        gc.collect()
        wait_until(lambda: all(ref() is None for refs_ in refs for ref in refs_))
        assert [*map(float, losses)]


@on_devices
def test_no_more_than_two_batches_of_copies_are_alive(devices, monkeypatch):
    copies = []
    carry = evenstep.options.experiment.carry

    def noted(*given):
        copied = carry(*given)
        copies.append(weakref.ref(copied))
        return copied

    monkeypatch.setattr("evenstep.options.experiment.carry", noted)
    each = 8 * 3  # shards, and X, y, number
    with opened(devices, memory_format="channels_last") as (trainer, gates):
        for number, batch in enumerate(numbered(5)):
            if number:
                gates.hold(number)
            trainer.step(*batch)
            wait_until(lambda: len(copies) >= each * (number + 1))  # noqa: B023
            assert sum(ref() is not None for ref in copies) <= 2 * each
            gates.release(number - 1)
        gates.release(4)
        trainer.waitall()
        gc.collect()
        wait_until(lambda: all(ref() is None for ref in copies))


@on_devices
def test_without_copies_no_shard_begins(devices):
    let_copy = threading.Event()
    let_copy.set()
    with opened(devices, lanes=lambda found: HeldCopies(found, let_copy)) as (trainer, gates):
        first, second = numbered(2)
        trainer.step(*first)
        let_copy.clear()
        gates.hold(1)
        loss = trainer.step(*second)
        assert not gates.at_work[1].is_set()
        let_copy.set()
        wait(gates.at_work[1])
        gates.release(1)
        assert float(loss) > 0
