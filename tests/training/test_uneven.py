"""Devices of different speed, and devices that fail: time is lost, bits never are."""

import copy
import functools
import itertools
import logging
import threading
import time

import pytest
import torch
from torch import nn

import evenstep
from evenstep.batch import contiguous_runs
from evenstep.errors import DeviceLostError
from layouts import own, shared
from reference import assert_same_bits
from trainers import open_trainer, state_of, take_steps
from warm import run
from zoo import CLASSES, build, make_batches

PATIENCE_S = 30
MOST_STEPS = 5000
BATCHES = make_batches((48, 40, 48, 33, 48, 40))


def uneven(model, late_ms):
    """Have each CPU device take so many milliseconds longer for a shard than it must."""
    late_s = {f"evenstep cpu:{number}": late / 1e3 for number, late in enumerate(late_ms)}

    def wait_a_little(module, inputs):
        time.sleep(late_s[threading.current_thread().name])

    model.register_forward_pre_hook(wait_a_little)
    return model


@functools.cache
def even_run():
    return take_steps(open_trainer(build("batch_norm"), devices=1), BATCHES)


class LateOnce:
    """A forward pre-hook: one lane stays at its first shard until the others have done the rest."""

    def __init__(self, lane_name):
        self._lane_name, self._others_did, self._is_over = lane_name, [], threading.Event()

    def __deepcopy__(self, memo):
        return self

    def __call__(self, module, inputs):
        if threading.current_thread().name == self._lane_name:
            assert self._is_over.wait(PATIENCE_S)
            return
        self._others_did.append(None)
        if len(self._others_did) >= 7:
            self._is_over.set()


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize(("devices", "slow"), [(2, 0), (2, 1), (3, 2)])
def test_idle_devices_take_shards_from_a_slow_one_and_move_no_bits(devices, slow, max_in_flight):
    model = build("batch_norm")
    model.register_forward_pre_hook(LateOnce(f"evenstep cpu:{slow}"))
    options = {"devices": devices, "max_in_flight": max_in_flight, "check": "off"}
    with open_trainer(model, **options) as trainer:
        trainer.step(*BATCHES[0])
        trainer.waitall()
        in_first_step = trainer.shares()
        for X, y in BATCHES[1:]:
            trainer.step(X, y)
        trainer.waitall()
        assert_same_bits(state_of(trainer), even_run())
        assert sum(own.shards for own in trainer.shares()) == len(BATCHES) * 8
    assert in_first_step[slow].shards == 1
    assert sum(own.shards for own in in_first_step) == 8
    assert sum(own.stolen for own in in_first_step) >= 1  # the second shard of the slow one's pair


def test_runs_follow_the_measured_speeds():
    """After the first steps the fast device gets a longer run, and little is left to steal."""
    with open_trainer(uneven(build("convolution"), (0, 30)), devices=2) as trainer:
        for X, y in BATCHES:
            trainer.step(X, y)
        runs = contiguous_runs(range(8), trainer._executor.pace.speeds())
        assert len(runs[0]) > len(runs[1])
        trace = trainer.trace.spans
    last = [span for span in trace if span.story and span.story.get("step") == len(BATCHES) - 1]
    assert not any(span.story.get("stolen") for span in last)


class Stops(nn.Module):
    """A model whose forward pass stops dead in one lane.

    Args:
        lane_name: the name of the lane's thread.
        stop: called there.
        at: the number of the shard there: the fortieth comes after the check of the first step.
            Before the first one, no other lane ends a shard, and so none can take it.
    """

    def __init__(self, lane_name, stop, at=40):
        super().__init__()
        torch.manual_seed(0)
        self.body = build("batch_norm")
        self._lane_name, self._stop, self._seen, self._at = lane_name, stop, [], at
        self._has_begun = threading.Event()

    def __deepcopy__(self, memo):
        copied = Stops.__new__(Stops)
        nn.Module.__init__(copied)
        for name in ("_lane_name", "_stop", "_seen", "_at", "_has_begun"):
            setattr(copied, name, getattr(self, name))
        copied.body = copy.deepcopy(self.body, memo)
        return copied

    def forward(self, x):
        if threading.current_thread().name == self._lane_name:
            self._has_begun.set()
            self._seen.append(None)
            if len(self._seen) == self._at:
                self._stop()
        elif self._at == 1:
            assert self._has_begun.wait(PATIENCE_S)
        return self.body(x)


def train_with(stop, lane_name="evenstep cpu:1", devices=("cpu:0", "cpu:1"), **options):
    """Train until the lane has stopped and all batches were seen since; how soon it gets its
    fortieth shard depends on its speed."""
    options, losses, steps_to_go = {"lost_after_s": 0.3, **options}, [], len(BATCHES)
    with open_trainer(Stops(lane_name, stop), devices=list(devices), **options) as trainer:
        for X, y in itertools.islice(itertools.cycle(BATCHES), MOST_STEPS):
            losses.append(trainer.step(X, y))
            steps_to_go -= bool(trainer._engine.lost_lanes)
            if not steps_to_go:
                break
        losses = [float(loss) for loss in losses]
        trainer.waitall()
        return state_of(trainer), losses, trainer


def assert_costs_time_only(trained):
    state, found, uneven_one = trained
    assert uneven_one.steps_done == len(found)
    with open_trainer(Stops("no lane", fail), devices=["cpu:0"]) as trainer:
        batches = itertools.islice(itertools.cycle(BATCHES), len(found))
        assert found == [float(trainer.step(*batch)) for batch in batches]
        assert_same_bits(state, state_of(trainer))


def fail():
    raise DeviceLostError("the device fell off the bus")


@pytest.fixture
def hang():
    """A function that stops dead; at the end of the test it goes on, so that its thread ends."""
    released = threading.Event()
    before = threading.enumerate()
    yield released.wait
    released.set()
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(PATIENCE_S)


@pytest.fixture
def stops(request, hang):
    return {"fails": fail, "hangs": hang}[request.param]


@pytest.mark.parametrize(
    ("stops", "max_in_flight", "devices"),
    [
        ("fails", 1, shared(2)),
        ("fails", 2, ["cpu:0", "cpu:1:own"]),
        ("hangs", 1, ["cpu:0", "cpu:1:own"]),
        ("hangs", 2, shared(2)),
        ("hangs", 1, shared(3)),
        ("fails", 2, shared(3)),
    ],
    indirect=["stops"],
)
@pytest.mark.thinned(2)
def test_a_lost_device_costs_time_only(stops, max_in_flight, devices, caplog):
    lane, options = f"evenstep {devices[1]}", {"max_in_flight": max_in_flight}
    with caplog.at_level(logging.WARNING):
        assert_costs_time_only(train_with(stops, lane, devices, **options))
    (line,) = [record.message for record in caplog.records if "was lost" in record.message]
    assert line.startswith(f"{devices[1]} was lost in step ")
    assert "the other devices go on without it, with the same result" in line


def test_a_first_device_that_computes_on_a_copy_can_be_lost_too(hang):
    assert_costs_time_only(train_with(hang, "evenstep cpu:0", max_in_flight=2))


@pytest.mark.parametrize("devices", [shared(2), own(2), shared(1)], ids=str)
def test_without_the_device_that_holds_the_model_training_ends_with_an_error(devices):
    with pytest.raises(DeviceLostError, match=r"fell off|cpu:0(:own)? was lost"):
        train_with(fail, f"evenstep {devices[0]}", devices)


@pytest.mark.parametrize("stops", ["fails", "hangs"], indirect=True)
def test_without_it_an_evaluation_does_so_too(stops):
    with pytest.raises(DeviceLostError, match="fell off|cpu:0 was lost"):
        evaluated(Stops("evenstep cpu:0", stops, at=1), shared(2))


def evaluated(model, devices, **options):
    """Evaluate, predict, and train on, with a trainer of its own."""
    with open_trainer(model, devices=devices, lost_after_s=0.3, **options) as trainer:
        metrics = trainer.evaluate(BATCHES, {"accuracy": evenstep.metrics.accuracy})
        outputs = trainer.predict([X for X, _ in BATCHES])
        loss = float(trainer.step(*BATCHES[0]))
        return metrics, outputs.tolist(), loss, state_of(trainer)


@pytest.mark.parametrize(
    ("stops", "max_in_flight", "devices"),
    [
        ("fails", 1, ["cpu:0", "cpu:1:own"]),
        ("fails", 2, shared(2)),
        ("hangs", 1, shared(2)),
        ("hangs", 2, ["cpu:0", "cpu:1:own"]),
    ],
    indirect=["stops"],
)
@pytest.mark.thinned(2)
def test_a_device_lost_in_an_evaluation_costs_time_only(stops, max_in_flight, devices, caplog):
    options = {"max_in_flight": max_in_flight}
    with caplog.at_level(logging.WARNING):
        *found, state = evaluated(Stops(f"evenstep {devices[1]}", stops, at=1), devices, **options)
    *expected, undisturbed = evaluated(Stops("no lane", fail), ["cpu:0"])
    assert found == expected
    assert_same_bits(state, undisturbed)
    (line,) = [record.message for record in caplog.records if "was lost" in record.message]
    assert line.startswith(f"{devices[1]} was lost in an evaluation (")
    assert line.endswith("the other devices go on without it, with the same result")


class StandsStill(nn.Module):
    """A model that stops dead in the shard with a large example."""

    def __init__(self, stop):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self._stop = nn.Linear(36, CLASSES), stop

    def __deepcopy__(self, memo):
        copied = StandsStill(self._stop)
        copied.layer = copy.deepcopy(self.layer, memo)
        return copied

    def forward(self, x):
        if x.detach().abs().max() > 1e3:
            self._stop()
        return self.layer(x.flatten(1))


def with_a_large_example(batch):
    (X, *rest), X = batch, batch[0].clone()
    X[len(X) // 2 - 1] *= 1e6  # of the first half, which cpu:0 computes
    return X, *rest


@pytest.mark.parametrize("call", ["step", "evaluate"])
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.thinned(2)
def test_a_shard_that_stands_still_side_by_side_ends_what_the_others_wait_for(
    call, max_in_flight, hang
):
    """cpu:0 stands still, and the shards of cpu:1 are at their end, or wait to gather rows."""
    options = {"side_by_side": True, "max_in_flight": max_in_flight, "lost_after_s": 0.3}
    metrics = {"accuracy": evenstep.metrics.accuracy}
    with open_trainer(StandsStill(hang), devices=2, **options) as trainer:
        trainer.step(*BATCHES[0])
        trainer.evaluate(BATCHES[:1], metrics)
        trainer.waitall()
        before = state_of(trainer)
        batch = with_a_large_example(BATCHES[0])
        with pytest.raises(DeviceLostError, match="cpu:0 was lost"):
            trainer.step(*batch).item() if call == "step" else trainer.evaluate([batch], metrics)
        assert_same_bits(state_of(trainer), before)
        with pytest.raises(DeviceLostError, match=r"cpu:0 was lost, and with side_by_side=True"):
            trainer.step(*BATCHES[0]).item()


def test_a_program_ends_although_a_shard_side_by_side_stands_still():
    script = """
import threading, torch, evenstep
from torch import nn

class Layer(nn.Linear):
    def forward(self, x):
        if x.detach().abs().max() > 1e3:
            threading.Event().wait()
        return super().forward(x)

torch.manual_seed(0)
model = Layer(3, 1)
layout, faults = evenstep.Layout(side_by_side=True), evenstep.Faults(lost_after_s=0.1)
options = dict(devices=2, shards=4, layout=layout, faults=faults)
X, y = torch.randn(8, 3), torch.randn(8, 1)
optimizer = torch.optim.SGD(model.parameters())
with evenstep.Trainer(model, optimizer, nn.MSELoss(), **options) as trainer:
    trainer.step(X, y)
    trainer.step(X, y)
    trainer.step(X.index_fill(0, torch.tensor([1]), 1e6), y)
"""
    ended = run("-c", script, timeout_s=PATIENCE_S)
    assert ended.returncode == 1
    assert "DeviceLostError: cpu:0 was lost" in ended.stderr


def test_a_device_that_is_merely_slow_is_not_given_up(caplog):
    """It is at a shard for longer than `lost_after_s`, but not for twenty times its usual time."""
    model = uneven(build("convolution"), (0, 30))
    with open_trainer(model, devices=2, lost_after_s=0.001) as trainer:
        for X, y in BATCHES:
            trainer.step(X, y)
    assert not [record for record in caplog.records if "lost" in record.message]


def test_devices_of_different_kinds_are_said_to_agree_within_rounding():
    devices = [evenstep.Device("cpu", 0, threads=1), evenstep.Device("cpu", 1, threads=2)]
    (note,) = [n for n in open_trainer(build("convolution"), devices=devices).notes if "kinds" in n]
    assert "equal within rounding, not bit for bit" in note
