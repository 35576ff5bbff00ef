"""After an error, the model is as the step found it; what was taken stays."""

import contextlib
import threading

import pytest
import torch
from torch import nn

from evenstep.checkpoint.async_writer import AsyncWriter
from evenstep.errors import ContractError, ModelError
from patience import only_one_interrupt, press_ctrl_c_when, wait
from reference import assert_same_bits
from trainers import LAYOUTS, open_trainer, state_of

in_flight = pytest.mark.parametrize("max_in_flight", [1, 2])
on_layouts = pytest.mark.parametrize("devices", LAYOUTS, ids=str)
INPUTS = torch.arange(24.0).reshape(8, 3) / 24
LABELS = torch.arange(8) % 4
BAD = torch.full((8, 3), -7.0)  # fails in the last shard only


def bang(x):
    raise LookupError("bang")


class Assigning(nn.Module):
    """Assigns a new tensor to a buffer in each forward pass, under two names."""

    def __init__(self, then=bang):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 4)
        self.layer.register_buffer("shift", torch.zeros(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("same", self.mean)
        self.then = then

    def forward(self, x):
        shift = self.layer.shift
        mean = self.mean + 1 + self.layer(x).detach().mean(0)
        self.mean = mean
        self.layer.shift = self.layer.shift - mean
        if x[0, 0] == BAD[0, 0]:
            self.then(self)
        return self.layer(x) + shift


class InPlace(Assigning):
    """Computes the same, and writes into the buffers' own tensors."""

    def forward(self, x):
        shift = self.layer.shift.clone()
        self.mean.copy_(self.mean + 1 + self.layer(x).detach().mean(0))
        self.layer.shift.copy_(self.layer.shift - self.mean)
        return self.layer(x) + shift


def bad_in_the_last_shard():
    X = INPUTS.clone()
    X[-2:] = BAD[-2:]
    return X


def buffers_of(model):
    return {name: id(buffer) for name, buffer in model.named_buffers(remove_duplicate=False)}


def step(trainer, X):
    trainer.step(X, LABELS)
    trainer.waitall()


def evaluate(trainer, X):
    trainer.evaluate([(X, LABELS)], {"sum": lambda output, y: (output.sum(), len(y))})


def predict(trainer, X):
    trainer.predict([X])


@contextlib.contextmanager
def beside_undisturbed(make=Assigning, *, devices, max_in_flight=2, check="off", **options):
    """Yield a trainer, and one that no error will disturb."""
    given = {"shards": 4, "devices": devices, "max_in_flight": max_in_flight, "check": check}
    with (
        open_trainer(make(), **given, **options) as trainer,
        open_trainer(Assigning(), **given) as whole,
    ):
        yield trainer, whole


def assert_same(trainer, whole):
    assert_same_bits(state_of(trainer), state_of(whole))


def assert_same_step(trainer, whole):
    step(trainer, INPUTS)
    step(whole, INPUTS)
    assert_same(trainer, whole)


@in_flight
@on_layouts
@pytest.mark.parametrize("call", [step, evaluate, predict])
@pytest.mark.thinned(2)
def test_an_error_leaves_assigned_buffers_as_they_were(call, devices, max_in_flight):
    check = "first" if (LAYOUTS.index(devices) + max_in_flight) % 2 else "off"
    options = {"devices": devices, "max_in_flight": max_in_flight, "check": check}
    with beside_undisturbed(**options) as (trainer, whole):
        for number in range(3):
            before, held = state_of(trainer), buffers_of(trainer.model)
            with pytest.raises(LookupError, match="bang"):
                call(trainer, bad_in_the_last_shard())
            assert buffers_of(trainer.model) == held
            assert_same_bits(state_of(trainer), before)
            assert trainer.steps_done == number
            assert_same_step(trainer, whole)


@in_flight
@on_layouts
def test_assigning_a_buffer_is_writing_it(devices, max_in_flight):
    """After a step that succeeds the buffer has the same value, and is the same tensor."""
    given = {"shards": 4, "devices": devices, "max_in_flight": max_in_flight}
    with (
        open_trainer(Assigning(), **given) as assigning,
        open_trainer(InPlace(), devices=1, shards=4) as writing,
    ):
        held = buffers_of(assigning.model)
        for _ in range(3):
            step(assigning, INPUTS)
            step(writing, INPUTS)
            assert_same_bits(state_of(assigning), state_of(writing))
        assert buffers_of(assigning.model) == held
        assert assigning.model.same is assigning.model.mean


@in_flight
@on_layouts
def test_a_buffer_that_is_none_after_forward_is_named(devices, max_in_flight):
    def drop(model):
        model.mean = None

    given = {"shards": 4, "devices": devices, "max_in_flight": max_in_flight, "check": "off"}
    with open_trainer(Assigning(drop), **given) as trainer:
        before, held = state_of(trainer), buffers_of(trainer.model)
        with pytest.raises(ModelError, match="buffer mean is None after forward"):
            step(trainer, bad_in_the_last_shard())
        assert buffers_of(trainer.model) == held
        assert_same_bits(state_of(trainer), before)
        step(trainer, INPUTS)


# ---- random numbers


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [step, evaluate])
def test_the_default_generator_is_as_the_call_found_it(call, error):
    def fail(x):
        raise error

    model = Assigning(lambda model: (torch.rand(2), fail(model)))
    with open_trainer(model, shards=4, check="off") as trainer:
        before = torch.get_rng_state()
        with pytest.raises(error):
            call(trainer, bad_in_the_last_shard())
        assert torch.equal(torch.get_rng_state(), before)


# ---- one point of commitment


@on_layouts
def test_an_error_after_the_update_drops_the_step_behind_it(devices):
    fails, let_go = [], threading.Event()

    def after_update(module):
        if fails:
            wait(let_go)
            raise LookupError(fails.pop())

    with beside_undisturbed(devices=devices, after_update=after_update) as (trainer, whole):
        for number in range(3):
            if number == 1:
                trainer.waitall()
                fails.append("bang")
            first = trainer.step(INPUTS, LABELS)
        let_go.set()
        with pytest.raises(LookupError, match="bang"):
            trainer.waitall()
        assert trainer.steps_done == 2
        for _ in range(2):
            last = whole.step(INPUTS, LABELS)
        whole.waitall()
        assert_same(trainer, whole)
        with pytest.raises(LookupError, match="bang"):  # it was not taken
            float(first)
        assert float(last) > 0


@on_layouts
def test_a_rate_set_before_a_step_that_is_refused_is_not_lost(devices):
    """The rate is recorded with the step that takes it."""

    class Refused(Assigning):
        refuses = True

        def forward(self, x):
            if self.refuses:
                with torch.no_grad():
                    self.layer.weight.copy_(self.layer.weight)
            return super().forward(x)

    with beside_undisturbed(Refused, devices=devices, check="first") as (trainer, whole):
        for one in (trainer, whole):
            one.optimizer.param_groups[0]["lr"] = 0.25
        with pytest.raises(ContractError):
            trainer.step(INPUTS, LABELS)
        assert trainer.steps_done == 0
        trainer.model.refuses = False
        assert_same_step(trainer, whole)


@on_layouts
def test_a_rate_set_before_a_step_that_fails_stays(devices):
    with beside_undisturbed(devices=devices) as (trainer, whole):
        step(trainer, INPUTS)
        step(whole, INPUTS)
        for one in (trainer, whole):
            one.optimizer.param_groups[0]["lr"] = 0.25
        with pytest.raises(LookupError, match="bang"):
            step(trainer, bad_in_the_last_shard())
        assert trainer.optimizer.param_groups[0]["lr"] == 0.25
        assert_same_step(trainer, whole)


def test_a_step_that_cannot_begin_does_not_hide_the_ones_before_it(monkeypatch):
    """Both are taken back: the position is that of the first one."""
    given = {"shards": 4, "devices": 2, "max_in_flight": 2, "check": "off"}
    with open_trainer(Assigning(), **given) as trainer:
        step(trainer, INPUTS)
        let_go = threading.Event()
        trainer.model.then = lambda model: wait(let_go)
        step(trainer, INPUTS)
        trainer.step(bad_in_the_last_shard(), LABELS)

        def fail(step):
            trainer._pipeline.steps[0].attempt.drop()  # its update shall not overtake the error
            let_go.set()
            raise LookupError("bang")

        monkeypatch.setattr(trainer._executor, "open", fail)
        with pytest.raises(LookupError, match="bang"):
            trainer.step(INPUTS, LABELS)
        monkeypatch.undo()
        assert trainer.steps_done == 2
        step(trainer, INPUTS)


# ---- checkpoints written in the background


def test_ctrl_c_while_a_checkpoint_is_awaited_does_not_forget_it(tmp_path, monkeypatch, request):
    only_one_interrupt(request)
    let_go = threading.Event()
    monkeypatch.setattr(
        "evenstep.checkpoint.async_writer._write", lambda *_: (wait(let_go), tmp_path)[1]
    )
    with open_trainer(Assigning(), shards=4, check="off") as trainer:
        step(trainer, INPUTS)
        trainer.save(tmp_path, background=True)
        pressed = press_ctrl_c_when("wait_for_save")
        with pytest.raises(KeyboardInterrupt):
            trainer.wait_for_save()
        pressed.join()
        assert isinstance(trainer._saver.writer, AsyncWriter)
        assert trainer._saver.writer.pending is not None
        let_go.set()
        trainer.wait_for_save()
        assert trainer._saver.writer.pending is None
