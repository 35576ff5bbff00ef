"""Callbacks hear of every step that was taken, in order, and can't break one."""

import functools
import math
import signal

import pytest
import torch
from torch import nn

import evenstep
from evenstep.callbacks import Callback, EpochRecord
from evenstep.errors import InputError, NonFiniteLossError
from launched import launched
from resuming import LOADER, OPTIMIZERS
from resuming import run as run_steps
from trainers import open_trainer, sgd
from zoo import build, make_batches

BATCHES = make_batches((24, 17, 24))


class Heard(Callback):
    """Keeps all records."""

    def __init__(self, fails_at=()):
        self.records = []
        self.calls = []
        self._fails_at = fails_at

    def open(self, step):
        self.calls.append(("open", step))

    def on_step(self, record):
        self.records.append(record)
        self.calls.append(("step", record.step))
        if record.step in self._fails_at:
            raise ValueError(f"not step {record.step}")

    def on_epoch(self, record):
        self.calls.append(("epoch", record))

    def on_save(self, record):
        assert (record.path / "manifest.json").exists() or any(record.path.iterdir())
        self.calls.append(("save", record.step, record.path.name))

    def close(self):
        self.calls.append(("close",))


def error_of(call):
    try:
        call()
    except Exception as error:
        return error
    return None


def heard(devices=1, **options):
    """Return the callback, the losses that `step` returned, and the fingerprint."""
    callback = Heard()
    with open_trainer(
        build("convolution"), devices=devices, callbacks=[callback], **options
    ) as trainer:
        losses = [trainer.step(X, y) for X, y in BATCHES]
        trainer.waitall()
        return callback, [float(loss) for loss in losses], trainer.fingerprint()


@pytest.fixture(scope="module")
def plain():
    """The fingerprint of a training without callbacks."""
    with open_trainer(build("convolution"), devices=1) as trainer:
        for X, y in BATCHES:
            trainer.step(X, y)
        return trainer.fingerprint()


@pytest.mark.parametrize(("devices", "in_flight"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_every_step_is_told_once_in_order_with_the_same_bits(plain, devices, in_flight):
    callback, losses, fingerprint = heard(devices, max_in_flight=in_flight)
    expected, same_losses, _ = heard(1)
    assert [record.loss for record in callback.records] == losses == same_losses
    assert fingerprint == plain
    assert [record.step for record in callback.records] == [1, 2, 3]
    assert [record.examples for record in callback.records] == [24, 17, 24]
    assert all(record.lrs == (0.1,) for record in callback.records)
    assert [one.epoch for one in callback.records] == [one.epoch for one in expected.records]


def test_without_steps_in_flight_a_step_is_told_before_it_returns():
    callback = Heard()
    with open_trainer(build("convolution"), callbacks=[callback]) as trainer:
        for number, (X, y) in enumerate(BATCHES, 1):
            trainer.step(X, y)
            assert len(callback.records) == number


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_time_of_a_step_is_split_as_shares_does(in_flight):
    callback = Heard()
    with open_trainer(
        build("convolution"), callbacks=[callback], max_in_flight=in_flight
    ) as trainer:
        for X, y in BATCHES * 2:
            trainer.step(X, y)
        trainer.waitall()
        shares = trainer.shares()
    seconds = sum(record.seconds for record in callback.records)
    assert seconds == pytest.approx(shares[0].wall_s, rel=1e-6)
    for share in shares:
        busy_s = sum(record.busy[share.device] * record.seconds for record in callback.records)
        assert busy_s == pytest.approx(share.compute_s + share.sum_s + share.update_s, rel=0.05)


def test_learning_rates_are_those_of_the_submission():
    callback, model = Heard(), build("convolution")
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), callbacks=[callback], max_in_flight=2
    ) as trainer:
        for X, y in BATCHES:
            trainer.step(X, y)
            scheduler.step()
    assert [record.lr for record in callback.records] == [0.1, 0.05, 0.025]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_an_error_leaves_the_step_taken_and_the_others_hear_of_it(plain, in_flight):
    failing, other = Heard(fails_at=(2,)), Heard()
    with open_trainer(
        build("convolution"), callbacks=[failing, other], max_in_flight=in_flight
    ) as trainer:
        calls = [*[functools.partial(trainer.step, *batch) for batch in BATCHES], trainer.waitall]
        errors = [error for call in calls if (error := error_of(call)) is not None]
        assert [str(error) for error in errors] == ["not step 2"]
        assert trainer.steps_done == 3
        assert trainer.fingerprint() == plain
    assert [record.step for record in failing.records] == [1, 2, 3]
    assert failing.records == other.records


@pytest.mark.parametrize("in_flight", [1, 2])
def test_steps_that_were_not_taken_are_not_told(in_flight):
    callback, (X, y) = Heard(), BATCHES[0]
    with open_trainer(
        build("convolution"), callbacks=[callback], max_in_flight=in_flight, check="off"
    ) as trainer:
        trainer.step(X, y)
        with pytest.raises(NonFiniteLossError):
            float(trainer.step(X * math.nan, y))
        trainer.step(X, y)
    assert [record.step for record in callback.records] == [1, 2]


def test_an_error_after_the_update_leaves_no_gap():
    callback, fails = Heard(), iter([False, True, False])

    def after_update(module):
        if next(fails):
            raise ValueError("after the update")

    with open_trainer(
        build("convolution"), callbacks=[callback], after_update=after_update
    ) as trainer:
        errors = [error_of(functools.partial(trainer.step, *batch)) for batch in BATCHES]
    assert [error and str(error) for error in errors] == [None, "after the update", None]
    assert [record.step for record in callback.records] == [1, 2, 3]


def test_steps_that_ended_before_an_error_are_told():
    callback = Heard()

    def train():
        with open_trainer(build("convolution"), callbacks=[callback], max_in_flight=3) as trainer:
            for X, y in BATCHES:
                trainer.step(X, y)
            float(trainer.step(*BATCHES[0]))
            raise KeyError

    with pytest.raises(KeyError):
        train()
    assert [record.step for record in callback.records] == [1, 2, 3, 4]
    assert callback.calls[-1] == ("close",)


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_other_optimizers_are_told_too(optimizer):
    callback, model = Heard(), build("convolution")
    with evenstep.Trainer(
        model, OPTIMIZERS[optimizer](model.parameters()), nn.CrossEntropyLoss(),
        callbacks=[callback],
    ) as trainer:  # fmt: skip
        losses = [float(trainer.step(X, y)) for X, y in BATCHES]
    assert [record.loss for record in callback.records] == losses
    assert all(record.seconds > 0 for record in callback.records)
    shares = callback.records[-1].busy.values()
    assert 0 < max(shares) <= 1
    assert min(shares) >= 0  # one device may have done it all


def test_backward_is_a_step():
    callback, model = Heard(), build("convolution")
    optimizer = sgd(model)
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), callbacks=[callback]) as trainer:
        trainer.backward(*BATCHES[0])
        optimizer.step()
        trainer.step(*BATCHES[1])
    assert [record.step for record in callback.records] == [1, 2]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_an_epoch_is_told_after_its_steps(in_flight):
    callback = Heard()
    with open_trainer(
        build("convolution"), callbacks=[callback], max_in_flight=in_flight
    ) as trainer:
        run_steps(trainer, 7)
    kinds = [call[0] for call in callback.calls]
    steps = ["step"] * len(LOADER)
    assert kinds == ["open", *steps, "epoch", *steps, "epoch", "step", "close"]
    first, second = (call[1] for call in callback.calls if call[0] == "epoch")
    records = callback.records[:3]
    examples = sum(record.examples for record in records)
    total = sum(record.loss * record.examples for record in records)
    assert first == EpochRecord(
        epoch=0, step=3, steps=3, examples=53, loss=total / examples,
        seconds=sum(record.seconds for record in records),
    )  # fmt: skip
    assert (second.epoch, second.step, second.steps) == (1, 6, 3)


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_is_told_when_it_is_on_the_disk(background, tmp_path):
    callback = Heard()
    with open_trainer(build("convolution"), callbacks=[callback], max_in_flight=2) as trainer:
        trainer.step(*BATCHES[0])
        trainer.step(*BATCHES[1])
        path = trainer.save(tmp_path, background=background)
    assert [call for call in callback.calls if call[0] != "epoch"] == [
        ("open", 0), ("step", 1), ("step", 2), ("save", 2, path.name), ("close",)
    ]  # fmt: skip


def test_an_error_of_a_callback_costs_no_checkpoint(tmp_path):
    with open_trainer(
        build("convolution"), callbacks=[Heard(fails_at=(2,))], max_in_flight=3
    ) as trainer:
        trainer.step(*BATCHES[0])
        trainer.step(*BATCHES[1])
        with pytest.raises(ValueError, match="not step 2"):
            trainer.save(tmp_path)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000002"]


def test_a_callback_may_evaluate_and_save(tmp_path):
    class Saves(Heard):
        def on_step(self, record):
            super().on_step(record)
            trainer.save(tmp_path)
            trainer.evaluate(BATCHES, {"accuracy": evenstep.metrics.accuracy})

    callback = Saves()
    with open_trainer(build("convolution"), callbacks=[callback], max_in_flight=2) as trainer:
        for X, y in BATCHES:
            trainer.step(X, y)
    assert [record.step for record in callback.records] == [1, 2, 3]


def test_a_resumed_trainer_opens_them_at_its_step(tmp_path):
    with open_trainer(build("convolution")) as trainer:
        trainer.step(*BATCHES[0])
        trainer.save(tmp_path)
    callback, model = Heard(), build("convolution")
    with evenstep.Trainer.load(
        tmp_path, model, sgd(model), nn.CrossEntropyLoss(), callbacks=[callback]
    ) as trainer:
        trainer.step(*BATCHES[1])
    assert callback.calls == [("open", 1), ("step", 2), ("close",)]


def test_what_is_no_callback_is_refused():
    with pytest.raises(InputError, match=r"got <class .*Heard'> in callbacks: give a list of"):
        open_trainer(build("convolution"), callbacks=[Heard])


class Norms(Heard):
    grad_norm = True


@pytest.mark.parametrize(("devices", "in_flight"), [(1, 1), (2, 2)])
def test_the_norm_of_the_gradient_can_be_asked_for(plain, devices, in_flight):
    callback, norms = Norms(), []
    with open_trainer(
        build("convolution"), devices=devices, callbacks=[callback], max_in_flight=in_flight
    ) as trainer:
        for X, y in BATCHES:
            trainer.step(X, y)
            trainer.waitall()
            gradients = [one.grad for one in trainer.model.parameters()]
            norms.append(float(nn.utils.get_total_norm(gradients)))
        assert trainer.fingerprint() == plain
    assert [record.outputs["grad_norm"] for record in callback.records] == norms


class Bags(nn.Module):
    """Learns a sparse and a dense table, in two dtypes."""

    def __init__(self):
        super().__init__()
        self.sparse = nn.Embedding(10, 4, sparse=True)
        self.dense = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, words):
        return self.dense(self.sparse(words).mean(1).double())


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_norm_of_sparse_gradients_is_that_of_dense_ones(in_flight):
    torch.manual_seed(0)
    callback, model = Norms(), Bags()
    words, y = torch.randint(10, (16, 3)), torch.arange(16) % 3
    expected = []

    def measure(module):
        squares = [one.grad.to_dense().double().square().sum() for one in module.parameters()]
        expected.append(float(sum(squares).sqrt()))

    with evenstep.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), devices=2,
        callbacks=[callback], before_update=measure, max_in_flight=in_flight,
    ) as trainer:  # fmt: skip
        trainer.step(words, y)
        trainer.step(words, y)
    norms = [record.outputs["grad_norm"] for record in callback.records]
    assert norms == pytest.approx(expected, rel=1e-6)


def test_ctrl_c_in_a_callback_leaves_the_step_taken(plain):
    class Pressed(Heard):
        def on_step(self, record):
            super().on_step(record)
            if record.step == 2:
                signal.raise_signal(signal.SIGINT)

    callback, before = Pressed(), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with open_trainer(build("convolution"), devices=2, callbacks=[callback]) as trainer:
            trainer.step(*BATCHES[0])
            with pytest.raises(KeyboardInterrupt):
                trainer.step(*BATCHES[1])
            trainer.step(*BATCHES[2])
            assert trainer.fingerprint() == plain
    finally:
        signal.signal(signal.SIGINT, before)
    assert [record.step for record in callback.records] == [1, 2, 3]


@pytest.mark.slow
def test_of_several_processes_the_first_one_is_told_or_all():
    done = launched(2, "callbacks.py")
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == ["rank 0 each 3", "rank 0 first 3", "rank 1 each 3", "rank 1 first 0"]
