"""Trainers whose devices compute the slices of each shard together: the bits of one device."""

import functools
import json
import logging
import signal
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dying import end_lane
from evenstep import Slices, Trainer
from evenstep.engine import InlineLanes
from evenstep.errors import CheckpointError, DeviceLostError, InputError
from evenstep.metrics import accuracy
from evenstep.nn import SlicedLinear, slice_
from grouping import grouped
from launched import launched
from layouts import DelayedLanes, mixed, own, shared
from patience import HUNG_TESTS_ABORT, only_one_interrupt, press_ctrl_c_when
from reference import assert_same_bits, reference_training, whole_state
from slicing import sliced_model
from trainers import state_of, take_steps
from zoo import build, make_batches

pytestmark = HUNG_TESTS_ABORT
LONG = pytest.mark.timeout(240)  # two processes import torch, on a busy machine

ADAM = functools.partial(torch.optim.Adam, lr=0.01)
SIZES = (21, 19, 5)
LAYOUTS = {
    "1": shared(1),
    "2": shared(2),
    "3": shared(3),
    "2 own": own(2),
    "3 own": own(3),
    "3 mixed": mixed(3),
}


def open_trainer(model=None, optimizer=ADAM, **options):
    model = sliced_model() if model is None else model
    defaults = {"devices": 2, "divide": Slices(), "memory_format": "contiguous", "shards": 4}
    options = grouped(**{**defaults, **options})
    return Trainer(model, optimizer(model.parameters()), nn.CrossEntropyLoss(), **options)


def train(sizes=SIZES, **options):
    with open_trainer(**options) as trainer:
        losses = [float(trainer.step(*batch)) for batch in make_batches(sizes)]
        return whole_state(trainer.model, trainer.optimizer), losses


@functools.cache
def reference_of(sizes, shards, slices=4):
    return reference_training(sliced_model(slices), ADAM, make_batches(sizes), shards=shards)


@pytest.mark.parametrize(
    ("layout", "divide"),
    [*((layout, Slices()) for layout in LAYOUTS), ("2", ()), ("3 own", ())],
    ids=str,
)
@pytest.mark.thinned(2)
def test_any_devices_and_any_split_equal_the_reference(layout, divide):
    expected, expected_losses = reference_of(SIZES, 4)
    state, losses = train(devices=LAYOUTS[layout], divide=divide, lanes=DelayedLanes)
    assert_same_bits(state, expected)
    assert losses == expected_losses


@settings(max_examples=8)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    shards=st.integers(1, 9),
    slices=st.sampled_from([1, 2, 4, 8]),
    layout=st.sampled_from(sorted(LAYOUTS)),
)
def test_any_sizes_shards_and_slices(sizes, shards, slices, layout):
    slices = min(slices, 4)
    expected, expected_losses = reference_of(tuple(sizes), shards, slices)
    model = sliced_model(slices)
    divide = Slices() if slices > 1 else ()
    state, losses = train(sizes, model=model, shards=shards, devices=LAYOUTS[layout], divide=divide)
    assert_same_bits(state, expected)
    assert losses == expected_losses


def test_other_slices_are_another_experiment():
    """The comparison can fail: S moves bits."""
    one, two = (train(model=sliced_model(slices))[0] for slices in (2, 4))
    with pytest.raises(AssertionError):
        assert_same_bits(one, two)


@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"memory_format": "channels_last"}])
def test_precision_and_memory_format(options):
    expected, _ = train(devices=1, divide=(), **options)
    for layout in ("2", "3 own"):
        assert_same_bits(train(devices=LAYOUTS[layout], **options)[0], expected)


@pytest.mark.parametrize("name", ["dropout", "batch_norm", "convolution", "tied"])
def test_models_whose_layers_were_sliced_afterwards(name):
    layers = {"dropout": ["1"], "batch_norm": ["0"], "convolution": ["4"], "tied": ["*code"]}[name]
    slices = {"dropout": 4, "batch_norm": 2, "convolution": 5, "tied": 3}[name]
    make = lambda: slice_(build(name), slices, layers=layers)  # noqa: E731
    sizes = (16, 24)
    expected, _ = reference_training(make(), ADAM, make_batches(sizes), shards=4)
    for layout in ("2", "3 own"):
        assert_same_bits(train(sizes, model=make(), devices=LAYOUTS[layout])[0], expected)


def test_lanes_without_threads():
    expected, _ = reference_of(SIZES, 4)
    assert_same_bits(train(devices=3, lanes=InlineLanes)[0], expected)


def test_evaluation_and_predictions():
    X, y = make_batches((23,))[0]
    found = []
    for options in ({"devices": 1}, {"devices": 3}, {"devices": own(2)}, {"divide": ()}):
        with open_trainer(**options) as trainer:
            trainer.step(X, y)
            measured = trainer.evaluate([(X, y)], {"accuracy": accuracy})
            found.append((measured, trainer.predict([X])))
    for measured, predicted in found[1:]:
        assert measured == found[0][0]
        assert torch.equal(predicted, found[0][1])


@pytest.mark.parametrize("devices", [shared(3), own(2)], ids=["shared", "own"])
def test_the_other_devices_compute_slices(devices):
    """Not the lead alone: in each forward and backward pass they meet once for each layer."""
    with open_trainer(devices=devices, check="off") as trainer:
        for batch in make_batches((16,)):
            trainer.step(*batch)
        exchanged = trainer.exchanged
    assert exchanged.waits == 4 * (2 * 7)  # shards, forward and backward, layers
    assert (exchanged.nbytes > 0) == (devices == own(2))


@pytest.mark.parametrize(("saved_on", "resumed_on"), [("2", "3 own"), ("3 own", "1")])
def test_a_resume_on_other_devices(saved_on, resumed_on, tmp_path):
    expected, _ = reference_of(SIZES, 4)
    first, *rest = make_batches(SIZES)
    with open_trainer(devices=LAYOUTS[saved_on]) as trainer:
        trainer.step(*first)
        trainer.save(tmp_path)
    model, loss = sliced_model(seed=1), nn.CrossEntropyLoss()
    divide = Slices() if resumed_on != "1" else ()
    options = grouped(devices=LAYOUTS[resumed_on], divide=divide)
    trainer = Trainer.load(tmp_path, model, ADAM(model.parameters()), loss, **options)
    assert_same_bits(take_steps(trainer, rest), expected)


def test_a_resume_with_other_slices_is_refused(tmp_path):
    with open_trainer() as trainer:
        trainer.step(*make_batches((8,))[0])
        trainer.save(tmp_path)
    model = sliced_model(2)
    message = r"can't resume with layer table 2 slices \(outputs\) instead of 4 slices"
    with pytest.raises(CheckpointError, match=message):
        Trainer.load(tmp_path, model, ADAM(model.parameters()), nn.CrossEntropyLoss(), devices=1)


def test_a_device_with_memory_of_its_own_holds_no_replica():
    with open_trainer(devices=own(3)) as trainer:
        trainer.step(*make_batches((8,))[0])
        replicas = trainer._replicas
    homes = {one.data_ptr() for one in trainer.model.parameters()}
    assert not replicas.copies
    assert {one.data_ptr() for each in replicas.all for one in each.parameters} == homes


def test_notes_do_not_count_shards_for_each_device():
    (note,) = Trainer(*given(), devices=2, shards=1).notes
    assert note.startswith("1 shard")
    assert open_trainer(shards=1).notes == []


def given():
    model = sliced_model()
    return model, ADAM(model.parameters()), nn.CrossEntropyLoss()


def results_of(finished, out, rank):
    assert finished.returncode == 0, finished.stderr
    return json.loads((out / f"{rank}.json").read_text())


@LONG
@pytest.mark.parametrize(
    ("devices", "split"), [("2,1", "slices"), pytest.param("1,1", "shards", marks=pytest.mark.slow)]
)
def test_two_processes_whose_devices_compute_slices(devices, split, tmp_path):
    finished = launched(2, "slices.py", tmp_path, devices, split)
    found = [results_of(finished, tmp_path, rank) for rank in range(2)]
    with Trainer(*given(), devices=1) as trainer:
        losses = [float(trainer.step(X, y)) for X, y in make_batches((33, 16, 30))]
        assert found == [[trainer.fingerprint(), losses]] * 2


@LONG
def test_processes_that_cut_layers_into_other_slices_are_refused(tmp_path):
    finished = launched(2, "slices.py", tmp_path, "1,1", "shards", "other")
    assert finished.returncode
    assert "2 slices (outputs) on rank 1" in finished.stderr
    assert "4 slices (outputs) on rank 0" in finished.stderr


class Breaks(nn.Module):
    """Raises in the forward pass of the third shard that it sees."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind, self.calls = SlicedLinear(36, 8, slices=4), kind, 0

    def forward(self, x):
        self.calls += 1
        if self.calls % 7 == 3:
            raise self.kind("in the third shard")
        return self.layer(x.flatten(1))


@pytest.mark.parametrize("kind", [ArithmeticError, KeyboardInterrupt, SystemExit])
def test_an_error_in_a_shard_ends_the_step_for_all_devices(kind):
    batch = make_batches((16,))[0]
    with open_trainer(Breaks(kind), devices=3, check="off") as trainer:
        with pytest.raises(kind, match="in the third shard"):
            trainer.step(*batch)
        assert trainer.steps_done == 0
        trainer.step(*batch)  # its shards are calls 4 to 7
        assert trainer.steps_done == 1


@pytest.mark.parametrize("devices", [shared(2), own(2)], ids=["shared", "own"])
def test_training_goes_on_without_a_device_whose_lane_has_ended(devices, caplog):
    expected, _ = reference_of(SIZES, 4)
    with caplog.at_level(logging.WARNING, "evenstep"), open_trainer(devices=devices) as trainer:
        for number, batch in enumerate(make_batches(SIZES)):
            if number == 1:
                end_lane(trainer._engine, 1)
            trainer.step(*batch)
        state = state_of(trainer)
    assert_same_bits(state, {name: torch.as_tensor(one) for name, one in expected.items()})
    (line,) = [record.message for record in caplog.records if "was lost" in record.message]
    assert line.startswith(f"{devices[1]} was lost in step 1")


def test_without_the_device_that_holds_the_model_training_is_refused():
    batch = make_batches((16,))[0]
    with open_trainer(devices=own(2)) as trainer:
        trainer.step(*batch)
        end_lane(trainer._engine, 0)
        for call in (trainer.step, lambda *batch: trainer.evaluate([batch], {"a": accuracy})):
            with pytest.raises(DeviceLostError, match="cpu:0:own was lost"):
                call(*batch)


def take_many_steps(trainer):
    for batch in make_batches((16,)) * 40:
        trainer.step(*batch)


def test_ctrl_c_while_the_lead_waits_for_a_slice(request, monkeypatch):
    only_one_interrupt(request)
    may_go_on, in_slice = threading.Event(), threading.Event()
    product = SlicedLinear.product

    def held(self):
        found = product(self)

        class Held(type(found)):
            def forward(self, given):
                if given.number == 3 and threading.current_thread().name.endswith("cpu:1"):
                    in_slice.set()
                    may_go_on.wait(1)
                return super().forward(given)

        return Held(slices=found.slices, along=found.along)

    model = nn.Sequential(nn.Flatten(), SlicedLinear(36, 8, slices=4))
    with open_trainer(model, check="off") as trainer:
        before = trainer.fingerprint()
        monkeypatch.setattr(SlicedLinear, "product", held)
        thread = press_ctrl_c_when("_wait_for")
        with pytest.raises(KeyboardInterrupt):
            take_many_steps(trainer)
        thread.join()
        monkeypatch.undo()
        may_go_on.set()
        assert trainer.fingerprint() == before or trainer.steps_done
        trainer.step(*make_batches((16,))[0])
    assert signal.getsignal(signal.SIGINT) is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divide": "layers"}, r"got divide='layers': give Stages.*, Slices\(\) or Owners"),
        ({"model": build("dropout")}, r"no layer of the model has slices: call evenstep\.nn\.sl"),
    ],
)
def test_what_does_not_work_together_is_refused_in_a_line(options, message):
    with pytest.raises(InputError, match=message) as caught:
        open_trainer(**options)
    assert "\n" not in str(caught.value)
