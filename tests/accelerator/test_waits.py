"""What the host waits for, and what is kept for streams that still use it."""

import contextlib
import threading

import pytest
import torch
from torch import nn

import emu
import evenstep
from evenstep import Engine
from evenstep.steps.executors import IndependentExecutor
from good_models import MODELS
from patience import wait_until
from zoo import build, make_batches

SHARDS = 8
BESIDES = 10
"""The most events that a step waits for besides one for each shard and each node of the tree."""


def waits_of_steps(name, **layout):
    """Train a model; return what the host has waited for in the steps that checked nothing."""
    torch.manual_seed(0)
    recipe = MODELS[name]
    model = recipe.make_model()
    optimizer = recipe.make_optimizer(model.parameters())
    waits = []
    with evenstep.Trainer(
        model, optimizer, recipe.loss, objective=recipe.objective, **layout
    ) as trainer:
        for _ in range(8):
            batch = recipe.make_batch(16)
            emu.host_waits()
            float(trainer.step(*batch))
            waits.append(emu.host_waits())
    return [waits[number] for number in (2, 4, 5, 6)]


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(
    "devices",
    [
        ["emu:0"],
        ["emu:0", "emu:1"],
        ["emu:0", "emu:1", "emu:2"],
        ["emu:0", "cpu:0"],
        ["cpu:0", "emu:1"],
        ["cpu:0", "cpu:1:own", "emu:0", "emu:1"],
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["mlp", "lenet", "resnet", "gpt"])
@pytest.mark.thinned(2)
def test_a_step_blocks_nowhere_and_polls_a_few_events_however_many_tensors(
    name, devices, in_flight
):
    for waits in waits_of_steps(name, devices=devices, max_in_flight=in_flight):
        polled = waits.pop(emu.POLLING)
        assert not waits
        assert polled <= SHARDS + (SHARDS - 1) * (len(devices) > 1) + BESIDES


def test_polling_is_counted_once_for_each_event_that_has_not_passed():
    emu.stand_still(0)
    event = torch.Event("emu:0")
    event.record(torch.accelerator.current_stream(0))
    emu.host_waits()
    assert not any(event.query() for _ in range(3))
    emu.stand_still(0, still=False)
    wait_until(event.query)
    assert emu.host_waits() == {emu.POLLING: 1}


def test_memory_of_a_plain_argument_is_kept_for_the_lane():
    with Engine(["emu:0"]) as engine:
        for number in range(20):
            handle = engine.submit(torch.mul, torch.full((256,), 1.0, device="emu:0"), number)
            wait_until(lambda handle=handle: handle.done)  # launched, and its argument dropped
            others = [torch.full((256,), -1.0, device="emu:0") for _ in range(3)]
            torch.accelerator.current_stream(0).synchronize()
            assert bool((handle.result() == number).all())
            del others


def test_a_result_of_another_lane_is_waited_for():
    with Engine(["emu:0", "emu:1"]) as engine:
        for number in range(20):
            first = engine.submit(torch.full, (256,), float(number), device="emu:0")
            there = engine.copy(first, "emu:1")
            assert bool((there.result() == number).all())


def test_a_result_is_kept_for_the_stream_that_reads_it():
    with Engine(["emu:0"]) as engine:
        for number in range(20):
            result = engine.submit(torch.full, (256,), float(number), device="emu:0")
            doubled = result.result() * 2
            del result
            later = engine.submit(torch.full, (256,), -1.0, device="emu:0")
            assert bool((doubled == 2 * number).all())
            later.result()


class Meeting(torch.Event):
    """An event that two threads ask at the same time whether it has passed, if they can."""

    def query(self):
        with contextlib.suppress(threading.BrokenBarrierError):
            self.barrier.wait(1)  # second, in which a lane comes that no lock holds up
        return super().query()


def test_a_writer_waits_for_readers_in_two_lanes_that_end_at_the_same_time():
    with Engine(["emu:0"]) as engine:
        var = engine.Var(torch.ones(256, device="emu:0"))
        passed = Meeting("emu:0")
        passed.barrier = threading.Barrier(2)
        passed.record(torch.accelerator.current_stream(0))
        passed.synchronize()
        emu.stand_still(0)  # so no other fence passes
        var.fences.append(passed)
        results = [engine.copy(var, "emu:0"), engine.submit(torch.clone, var)]
        wait_until(lambda: all(result.done for result in results))  # launched
        fences = len(var.fences)
        written = engine.submit(torch.Tensor.fill_, var, -1, writes=[var])
        emu.stand_still(0, still=False)
        written.wait_to_read()
        assert fences == len(results)
        assert all(bool((result.result() == 1).all()) for result in results)


def test_a_reader_does_not_wait_for_another_one():
    """Its stream gets no more to wait for than that of the first reader of a value."""
    torch.accelerator.empty_cache()  # blocks that are used again are filled first
    with Engine(["emu:0", "emu:1"]) as engine:
        unread, read = (engine.Var(torch.ones(256).pin_memory()) for _ in range(2))
        for device in range(2):
            emu.stand_still(device)
        readers, queued = [engine.copy(read, "emu:0")], []
        wait_until(lambda: readers[0].done)  # launched
        for var in (unread, read):
            before = emu.pending(1)
            readers.append(engine.copy(var, "emu:1"))
            wait_until(lambda: readers[-1].done)
            queued.append(emu.pending(1) - before)
        for device in range(2):
            emu.stand_still(device, still=False)
        assert queued[1] == queued[0] > 0
        assert all(reader.result().sum() == 256 for reader in readers)


def test_a_writer_waits_for_a_reader_in_the_other_lane():
    with Engine(["emu:0"]) as engine:
        for _ in range(20):
            var = engine.Var(torch.ones(256, device="emu:0"))
            read = engine.copy(var, "emu:0")
            written = engine.submit(torch.Tensor.fill_, var, -1, writes=[var])
            written.wait_to_read()
            assert read.result().sum() == 256


def train_some_steps(devices, **layout):
    """Train a model with BatchNorm for four steps, and evaluate it."""
    model = build("batch_norm")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), devices=devices, **layout
    ) as trainer:
        for batch in make_batches((33, 16, 30, 24)):
            trainer.step(*batch)
        trainer.evaluate(make_batches((16,)), {"accuracy": evenstep.metrics.accuracy})


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("devices", [["emu:2"], ["emu:2", "emu:1"], ["cpu:0", "emu:2"]], ids=str)
def test_devices_that_were_not_asked_for_are_not_touched(devices, in_flight):
    """The main thread's current device is the first one; each process would start CUDA there."""
    train_some_steps(devices, max_in_flight=in_flight)
    touched = {f"emu:{number}" for number in range(emu.DEVICES) if emu.is_used(number)}
    assert touched == {device for device in devices if device != "cpu:0"}


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("times", [1, 2])
def test_a_device_needs_one_stream_to_compute_and_one_to_copy(times, in_flight):
    """Memory that was freed on one stream can't be used on the others."""
    train_some_steps(["emu:0"] * times + ["emu:1"] * times, max_in_flight=in_flight)
    for device in range(2):
        lanes = {*emu.used_streams(device)} - {0}  # the default one, of the caller
        assert len(lanes) <= (1 if in_flight == 1 else 2) * times


def test_a_lane_waits_for_its_own_copies_only(monkeypatch):
    """Another device may stand still with its copies."""
    given, compute = [], IndependentExecutor.compute

    def spy(self, attempt, lane, batches=None):
        if batches is not None:  # not in an evaluation
            given.append(({*batches}, {*attempt.work.runs[lane]}))
        compute(self, attempt, lane, batches)

    monkeypatch.setattr(IndependentExecutor, "compute", spy)
    train_some_steps(["emu:0", "emu:1"], max_in_flight=2)
    assert len(given) == 2 * 4  # lanes, steps
    assert all(copied == run for copied, run in given)


def test_a_caller_s_numbers_are_its_own_beside_shards_that_draw():
    torch.manual_seed(3)
    expected = [torch.randn(4, device="emu:0").cpu() for _ in range(40)]
    torch.manual_seed(0)
    recipe = MODELS["vit"]
    model = recipe.make_model()
    optimizer = recipe.make_optimizer(model.parameters())
    with evenstep.Trainer(
        model,
        optimizer,
        recipe.loss,
        objective=recipe.objective,
        devices=["emu:0", "emu:1"],
        max_in_flight=2,
    ) as trainer:
        trainer.step(*recipe.make_batch(16))
        torch.manual_seed(3)
        found = []
        for _ in range(4):
            trainer.step(*recipe.make_batch(16))
            found += [torch.randn(4, device="emu:0").cpu() for _ in range(10)]
    assert all(map(torch.equal, found, expected))


def running_statistics(device):
    """Return a layer's running mean after each of three steps of LBFGS, read at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    X, y = torch.randn(16, 6), torch.arange(16) % 3
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), devices=device, shards=4
    ) as trainer:
        found = []
        for _ in range(3):
            trainer.step(X, y)
            found.append(torch.empty(8).copy_(model[1].running_mean))
    return found


@pytest.mark.parametrize("mode", emu.MODES)
def test_buffers_can_be_read_as_soon_as_a_step_of_lbfgs_returns(mode):
    expected = running_statistics("cpu:0")
    emu.configure(mode, seed=1, delay_us=200)
    assert all(map(torch.equal, running_statistics("emu:0"), expected))
