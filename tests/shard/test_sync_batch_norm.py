"""`batch_norm="sync"`: statistics of the whole batch, with the same bits on any devices."""

import contextlib
import os
import signal
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import evenstep
from evenstep.collectives import tree_sum
from evenstep.engine import InlineLanes
from evenstep.errors import (
    CheckpointError,
    DeviceLostError,
    InputError,
    ModelError,
)
from evenstep.steps.executors.sync_batch_norm import merge, moments_of
from layouts import LAYOUTS, DelayedLanes, shared, some_delay_s
from marks import slow
from reference import assert_same_bits, plain_training, whole_state
from trainers import open_trainer, sgd
from zoo import CLASSES, Branching


class Late(nn.Module):
    """Returns its input after a random delay, and likewise its gradient."""

    def forward(self, x):
        time.sleep(some_delay_s() / 2)
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda gradient: time.sleep(some_delay_s() / 2))
        return x


def build(dropout=0.0):
    """A net with four BatchNorm layers: two in parallel branches, one of them without weights."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), Late())
            self.left = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, momentum=None))
            self.right = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, affine=False), Late())
            self.drop = nn.Dropout(dropout)
            self.head = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, CLASSES))

        def forward(self, x):
            x = self.stem(x)
            return self.head(self.drop(torch.relu(self.left(x) + self.right(x)).flatten(1)))

    torch.manual_seed(1)
    return Net()


def batches(sizes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            3 + torch.randn(size, 1, 6, 6, generator=generator, dtype=dtype),
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for size in sizes
    ]


def opened(model, **options):
    return open_trainer(model, **{"batch_norm": "sync", **options})


def train(model, data, **options):
    """Train; return the trainer's whole state, its losses, and the trainer."""
    with opened(model, **{"lanes": DelayedLanes, **options}) as trainer:
        losses = [float(loss) for loss in [trainer.step(*batch) for batch in data]]
    return whole_state(model, trainer.optimizer), losses, trainer


QUICK = ("2 shared", "5 shared", "3 own", "3 mixed")


@pytest.mark.parametrize(
    ("dropout", "max_in_flight", "shards", "layouts"),
    [
        (0.4, 2, 7, QUICK),
        *[slow(*case, LAYOUTS) for case in ((0.0, 1, 7), (0.0, 2, 8), (0.4, 1, 8))],
    ],
)
def test_every_layout_has_the_same_bits(dropout, max_in_flight, shards, layouts):
    data = batches((21, 5))
    options = {"shards": shards, "max_in_flight": max_in_flight}
    expected, losses, _ = train(build(dropout), data, devices=1, **options)
    for layout in layouts:
        state, found, _ = train(build(dropout), data, devices=LAYOUTS[layout], **options)
        assert_same_bits(state, expected)
        assert found == losses


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_training_equals_the_whole_batch_up_to_rounding(shards):
    data = batches((24, 17), dtype=torch.float64)
    whole, ours = build().double(), build().double()
    losses = plain_training(whole, sgd(whole), data)
    _, found, _ = train(ours, data, shards=shards)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-12, atol=0)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-10, atol=1e-12)


def test_per_shard_statistics_differ():
    data = batches((24,))
    synced, by_shard = build(), build()
    train(synced, data)
    train(by_shard, data, batch_norm="shard")
    left, right = synced.left[1].running_var, by_shard.left[1].running_var
    assert not torch.allclose(left, right, rtol=1e-3)


def test_one_shard_is_the_plain_loop_bit_for_bit():
    data = batches((24, 17))
    whole, ours = build(), build()
    losses = plain_training(whole, sgd(whole), data)
    _, found, _ = train(ours, data, shards=1, memory_format="contiguous")
    assert found == losses
    assert_same_bits(dict(ours.named_parameters()), dict(whole.named_parameters()))


def test_shards_of_one_example_are_fine_and_a_batch_of_one_is_not():
    data = batches((8,))
    _, losses, _ = train(build(), data, shards=8)
    plain = build()
    assert losses == pytest.approx(plain_training(plain, sgd(plain), data), rel=1e-5)
    flat = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36), nn.Linear(36, CLASSES))
    with pytest.raises(ValueError, match="more than 1 value per channel"):  # torch's own
        train(flat, batches((1,)))


def test_bf16_sums_in_single_precision():
    data = batches((32,))
    one, three = build(), build()
    train(one, data, precision="bf16", devices=1)
    train(three, data, precision="bf16", devices=shared(3))
    assert_same_bits(one.state_dict(), three.state_dict())
    whole = build()
    plain_training(whole, sgd(whole), data)
    torch.testing.assert_close(
        one.left[1].running_var, whole.left[1].running_var, rtol=0.02, atol=1e-3
    )


def test_every_device_computes_its_shards_once():
    _, _, trainer = train(build(), batches((32, 32)), devices=2)
    assert [own.shards for own in trainer.shares()] == [8, 8]
    assert all(0 < own.compute_s <= own.wall_s for own in trainer.shares())


def test_evaluation_uses_the_running_statistics():
    model, data = build(), batches((32,))
    _, _, trainer = train(model, data)
    with trainer:
        found = trainer.predict([data[0][0]])
    with torch.no_grad():
        torch.testing.assert_close(found, model.eval()(data[0][0]))


def with_one(example, value):
    """Return a batch of 32 examples, one of which has this value everywhere."""
    X, y = batches((32,))[0]
    X[example] = value
    return X, y


class FailsInShard(nn.Module):
    """Raises in the shard that holds a huge value, while the other shards wait for it."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8))

    def forward(self, x):
        if x.max() > 1e6:
            raise KeyError("this shard")
        return self.head(x)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_an_error_in_one_shard_is_what_the_user_sees(devices):
    with pytest.raises(KeyError, match="this shard") as caught:
        train(FailsInShard(), [with_one(30, 1e7)], devices=devices)
    place = "in shard 7 (examples 28 to 31 of your batch) of step 0"
    assert any(place in note for note in caught.value.__notes__)


class LosesItsDevice(FailsInShard):
    """Its device fails at the first huge value."""

    def forward(self, x):
        try:
            return super().forward(x)
        except KeyError:
            raise DeviceLostError("the cable is out") from None


def test_after_a_device_failed_no_shard_waits_for_its_shards():
    (batch,) = batches((32,))
    with opened(LosesItsDevice()) as trainer:
        trainer.step(*batch)
        before = trainer.fingerprint()
        with pytest.raises(DeviceLostError, match="the cable is out"):
            trainer.step(*with_one(30, 1e7))
        with pytest.raises(DeviceLostError, match="cpu:1 was lost, and with batch_norm='sync'"):
            trainer.step(*batch)
        assert trainer.fingerprint() == before
        assert trainer.steps_done == 1


class PressesCtrlC(FailsInShard):
    """Presses Ctrl-C at a huge value, and continues."""

    def forward(self, x):
        if x.max() > 1e6:
            os.kill(os.getpid(), signal.SIGINT)
        return self.head(x)


@pytest.mark.parametrize("devices", [1, 2])
def test_ctrl_c_ends_the_step_and_the_next_one_works(devices):
    (batch,) = batches((32,))
    with opened(PressesCtrlC(), devices=devices) as trainer:
        trainer.step(*batch)
        before = trainer.fingerprint()
        with contextlib.suppress(KeyboardInterrupt):  # it may come when the update has begun
            trainer.step(*with_one(17, 1e7))
        assert trainer.steps_done in (1, 2)
        assert (trainer.fingerprint() == before) is (trainer.steps_done == 1)
        trainer.step(*batch)


class NormalisesSometimes(Branching):
    """Only shards whose first example is positive reach the BatchNorm layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(CLASSES)

    def forward(self, x):
        out = super().forward(x)
        return self.norm(out) if x.flatten(1)[0, 0] > 0 else out


@pytest.mark.parametrize("devices", [1, 2])
def test_a_model_whose_shards_branch_differently_is_refused(devices):
    X, y = batches((32,))[0]
    X[:16, 0, 0, 0], X[16:, 0, 0, 0] = 1, -1
    with pytest.raises(ModelError, match="BatchNorm call 1 was reached by shards 0, 1, 2, 3"):
        train(NormalisesSometimes(), [(X, y)], devices=devices, check="off")


def test_lanes_without_threads_are_refused_for_several_devices():
    with pytest.raises(InputError, match="lanes without threads"):
        train(build(), [], lanes=InlineLanes)


def test_lanes_without_threads_have_the_bits_of_one_device():
    data = batches((21,))
    expected, _, _ = train(build(), data)
    state, _, _ = train(build(), data, devices=1, lanes=InlineLanes)
    assert_same_bits(state, expected)


def test_batch_norm_is_part_of_the_experiment_and_of_checkpoints(tmp_path):
    data = batches((32, 32, 32))
    expected, _, _ = train(build(), data)
    train(build(), data[:1])[2].save(tmp_path)
    fresh = build()
    given = tmp_path, fresh, sgd(fresh), nn.CrossEntropyLoss()
    with pytest.raises(CheckpointError, match="batch_norm shard instead of sync"):
        evenstep.Trainer.load(*given, experiment=evenstep.Experiment(batch_norm="shard"))
    with evenstep.Trainer.load(*given, devices=3) as resumed:
        for batch in data[1:]:
            resumed.step(*batch)
    assert_same_bits(whole_state(fresh, resumed.optimizer), expected)


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 6), min_size=2, max_size=9), offset=st.floats(-1e3, 1e3))
def test_merged_moments_are_those_of_all_values(sizes, offset):
    values = torch.randn(sum(sizes), 3, 2, dtype=torch.float64) + offset
    parts = [moments_of(part) for part in values.split(sizes)]
    merged = tree_sum(parts, merge)
    assert merged.size == values.numel() // 3
    torch.testing.assert_close(merged.mean, values.mean((0, 2)))
    squares = values.var((0, 2), correction=0) * merged.size
    torch.testing.assert_close(merged.squares, squares, rtol=1e-8, atol=1e-12)
