"""What lanes, shards' threads and the caller have in common, each with streams of its own."""

import threading

import pytest
import torch
from torch import nn

import emu
import evenstep
from patience import wait_until
from reference import assert_same_bits, whole_state
from zoo import build, make_batches

SIZES = (33, 16, 30, 24)
SIDE_BY_SIDE = evenstep.Layout(side_by_side=True)
STAGES = evenstep.Layout(divide=evenstep.Stages("balanced"))


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def state_of(model, optimizer):
    return emu.on_the_host(whole_state(model, optimizer))


def with_table(model, images, table, classes):
    """A loss with a term that every shard reads from a tensor that the whole batch has."""
    extra = len(images) * (table * table).sum() * next(model.parameters()).sum()
    return nn.functional.cross_entropy(model(images), classes, reduction="sum") + extra, len(images)


@pytest.mark.parametrize("mode", ["lazy", "random", "thread"])
@pytest.mark.parametrize(
    ("devices", "layout"),
    [
        (["emu:0"], SIDE_BY_SIDE),
        (["emu:0", "emu:1"], SIDE_BY_SIDE),
        (["emu:0", "emu:1"], STAGES),
        (["emu:0", "emu:0"], evenstep.Layout()),
    ],
    ids=["side by side", "side by side on two", "stages", "one listed twice"],
)
def test_threads_of_one_device_wait_for_the_copy_of_a_shared_tensor(devices, layout, mode):
    def train(devices, layout):
        model = build("convolution")
        optimizer = momentum(model)
        with evenstep.Trainer(
            model, optimizer, objective=with_table, devices=devices, shards=4, layout=layout
        ) as trainer:
            for number, (images, classes) in enumerate(make_batches(SIZES)):
                table = torch.full((999,), 0.01 * (number + 1))
                trainer.step(images, evenstep.shared(table), classes)
        return state_of(model, optimizer)

    expected = train(["cpu:0"], evenstep.Layout())
    for seed in range(3):
        emu.configure(mode, seed=seed)
        assert_same_bits(train(devices, layout), expected)


@pytest.mark.parametrize("mode", ["lazy", "random", "thread"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_lanes_of_one_device_wait_for_the_copy_of_a_loss(in_flight, mode):
    def train(devices):
        model = build("convolution")
        optimizer = momentum(model)
        there = devices[0] if devices[0].startswith("emu") else "cpu"
        loss = nn.CrossEntropyLoss(weight=torch.ones(5, device=there))
        with evenstep.Trainer(
            model, optimizer, loss, devices=devices, shards=4, max_in_flight=in_flight
        ) as trainer:
            for number, batch in enumerate(make_batches(SIZES)):
                trainer.waitall()
                loss.weight.fill_(1 / (number + 1)).add_(torch.arange(5, device=there) / 10)
                trainer.step(*batch)
        return state_of(model, optimizer)

    expected = train(["cpu:0"])
    for seed in range(3):
        emu.configure(mode, seed=seed)
        assert_same_bits(train(["emu:0", "emu:0"]), expected)


@pytest.mark.parametrize("where", ["pinned", "emu:0"])
def test_a_batch_that_is_written_to_while_it_is_copied_is_refused(where):
    """Its copying was launched before, but has not been done."""
    model = build("convolution")
    with evenstep.Trainer(
        model,
        momentum(model),
        nn.CrossEntropyLoss(),
        devices="emu:0",
        max_in_flight=2,
        faults=evenstep.Faults(check="off"),
    ) as trainer:
        (X, y), *_ = make_batches(SIZES)
        trainer.step(X, y)
        trainer.waitall()
        place = {"pin_memory": True} if where == "pinned" else {"device": where}
        given = torch.empty(X.shape, **place).copy_(X)
        torch.accelerator.synchronize(0)
        emu.stand_still(0)
        before = emu.pending(0)
        trainer.step(given, y)
        wait_until(lambda: emu.pending(0) >= before + 16)  # the copies of 8 shards
        given.zero_()
        emu.stand_still(0, still=False)
        with pytest.raises(evenstep.errors.BatchError, match="written to while its step"):
            trainer.waitall()


class Masked(nn.Module):
    """A layer with buffers that no shard writes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(36, 5)
        self.register_buffer("mask", torch.arange(36.0))
        self.norm = nn.BatchNorm1d(5)

    def forward(self, images):
        return self.norm(self.layer(images.flatten(1) + self.mask))


def test_the_caller_s_memory_is_not_that_of_a_step_s_opening():
    """The buffers' opening values are written back by kernels that were launched, but not run."""
    may_begin = threading.Event()

    def objective(model, images, classes):
        may_begin.wait(10)  # seconds
        return nn.functional.cross_entropy(model(images), classes, reduction="sum"), len(images)

    model = Masked().to("emu:0")
    with evenstep.Trainer(
        model,
        momentum(model),
        objective=objective,
        devices="emu:0",
        shards=2,
        max_in_flight=2,
        faults=evenstep.Faults(check="off"),
    ) as trainer:
        batches = make_batches((16, 16))
        may_begin.set()
        trainer.step(*batches[0])
        trainer.waitall()
        for _ in range(5):
            trainer.step(*batches[0])  # its opening is taken by this thread
            wait_until(lambda: trainer._executor.replicas.home.opening)
            opening = trainer._executor.replicas.home.opening
            may_begin.clear()
            trainer.step(*batches[1])
            wait_until(lambda was=opening: trainer._executor.replicas.home.opening is not was)
            del opening
            numbers = [torch.full((36,), -5.0, device="emu:0") for _ in range(8)]
            assert float(sum(numbers).sum()) == 8 * 36 * -5.0
            may_begin.set()
            trainer.waitall()
            assert torch.equal(model.mask.cpu(), torch.arange(36.0))


def test_threads_of_shards_use_the_same_streams_in_every_step():
    model = build("convolution")
    with evenstep.Trainer(
        model,
        momentum(model),
        nn.CrossEntropyLoss(),
        devices=["emu:0", "emu:1"],
        shards=4,
        layout=SIDE_BY_SIDE,
    ) as trainer:
        for batch in make_batches((16,) * 8):
            trainer.step(*batch)
    for device in range(2):
        lanes, shards, caller = 2, 2, 1
        assert len(emu.used_streams(device)) <= lanes + shards + caller
