"""`all_gather`: losses over the whole batch, computed in shards, gradients included."""

import functools
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.engine import InlineLanes
from evenstep.errors import ContractError, DeviceLostError, InputError
from grouping import grouped
from layouts import LAYOUTS, DelayedLanes
from marks import slow
from reference import assert_same_bits, whole_state
from trainers import open_trainer

SGD = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9)


class Pairs(nn.Module):
    """An encoder for each half of a pair, and a temperature."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(2)
        self.left = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
        self.right = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, a, b):
        time.sleep(time.perf_counter_ns() % 1000 * 1e-6)  # shards end in another order each time
        return F.normalize(self.left(a)), F.normalize(self.right(b))


def info_nce(model, a, b, index):
    """The symmetric contrastive loss of CLIP: each example against all others of the batch."""
    left, right = model(a, b)
    one = model.scale.exp() * left @ evenstep.all_gather(right).T
    other = model.scale.exp() * right @ evenstep.all_gather(left).T
    total = F.cross_entropy(one, index, reduction="sum")
    return total + F.cross_entropy(other, index, reduction="sum"), 2 * len(index)


def batches(sizes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def drawn(size, width):
        return torch.randn(size, width, generator=generator, dtype=torch.float64).to(dtype)

    return [(drawn(size, 6), drawn(size, 3), torch.arange(size)) for size in sizes]


def opened(objective=info_nce, dtype=torch.float32, **options):
    model = Pairs(dtype)
    options = {"objective": objective, "side_by_side": True, **options}
    return open_trainer(model, optimizer=SGD(model.parameters()), **options)


def train(data, objective=info_nce, dtype=torch.float32, **options):
    """Train; return the state, the losses and the trainer."""
    with opened(objective, dtype, **{"lanes": DelayedLanes, **options}) as trainer:
        losses = [float(loss) for loss in [trainer.step(*batch) for batch in data]]
    return whole_state(trainer.model, trainer.optimizer), losses, trainer


def plain(data, dtype, objective=info_nce):
    """Train by the plain loop over whole batches; return the model and the losses."""
    model, losses = Pairs(dtype), []
    optimizer = SGD(model.parameters())
    for batch in data:
        optimizer.zero_grad()
        total, count = objective(model, *batch)
        (total / count).backward()
        optimizer.step()
        losses.append((total / count).item())
    return model, losses


@pytest.mark.parametrize("shards", [2, 3, 8])
def test_a_contrastive_loss_is_that_of_the_whole_batch(shards):
    data = batches((32, 19), torch.float64)
    whole, losses = plain(data[:1], torch.float64)
    _, found, trainer = train(data[:1], dtype=torch.float64, shards=shards)
    assert found == pytest.approx(losses, rel=1e-12)
    for mine, its in zip(trainer.model.parameters(), whole.parameters(), strict=True):
        assert its.grad.abs().max() > 1e-3
        error = (mine.grad - its.grad).abs().max() / its.grad.abs().max()
        assert error < 1e-12
    whole, losses = plain(data, torch.float64)
    _, found, trainer = train(data, dtype=torch.float64, shards=shards)
    assert found == pytest.approx(losses, rel=1e-11)


def test_gradients_flow_to_the_keys():
    """Without them the training is another one, so the test above can fail."""
    data = batches((32,), torch.float64)

    def without(model, a, b, index):
        left, right = model(a, b)
        keys = evenstep.all_gather(right).detach()
        return F.cross_entropy(left @ keys.T, index, reduction="sum"), len(index)

    whole, _ = plain(data, torch.float64)
    _, _, trainer = train(data, without, torch.float64)
    assert not torch.allclose(trainer.model.left[0].weight.grad, whole.left[0].weight.grad)


QUICK = ("2 shared", "5 shared", "3 own", "3 mixed")


@pytest.mark.parametrize(
    ("shards", "max_in_flight", "layouts"),
    [(7, 1, QUICK[::2]), (8, 2, QUICK[1::2]), slow(7, 2, LAYOUTS), slow(8, 1, LAYOUTS)],
)
def test_every_layout_has_the_same_bits(shards, max_in_flight, layouts):
    data = batches((21, 33, 5, 1))
    expected, losses, _ = train(data, devices=1, shards=shards)
    for layout in layouts:
        options = {"devices": LAYOUTS[layout], "shards": shards, "max_in_flight": max_in_flight}
        state, found, _ = train(data, **options)
        assert_same_bits(state, expected)
        assert found == losses


def test_lanes_without_threads_have_the_bits_of_one_device():
    data = batches((21,))
    expected, _, _ = train(data)
    state, _, _ = train(data, devices=1, lanes=InlineLanes)
    assert_same_bits(state, expected)


@pytest.mark.parametrize("options", [{"side_by_side": False}, {}], ids=["apart", "side by side"])
def test_one_shard_is_the_plain_loop_bit_for_bit(options):
    data = batches((24, 17))
    whole, losses = plain(data, torch.float32)
    _, found, trainer = train(data, shards=1, **options)
    assert found == losses
    assert_same_bits(dict(trainer.model.named_parameters()), dict(whole.named_parameters()))


def distances(model, a, b, index):
    left, right = model(a, b)
    return (left - right).square().sum(), len(index)


@pytest.mark.parametrize(
    ("objective", "options"),
    [
        (distances, {"side_by_side": False}),
        (info_nce, {"side_by_side": False, "batch_norm": "sync"}),
    ],
)
def test_what_runs_side_by_side_changes_no_bits(objective, options):
    data = batches((21, 16))
    expected, losses, _ = train(data, objective)
    state, found, _ = train(data, objective, **options)
    assert found == losses
    assert_same_bits(state, expected)


def test_outside_of_a_trainer_there_is_the_tensor_itself():
    tensor = torch.ones(3)
    assert evenstep.all_gather(tensor) is tensor


def test_rows_are_in_the_order_of_the_batch_and_own_memory():
    seen = {}

    def objective(model, a, b, index):
        gathered = evenstep.all_gather(index[:, None])
        seen[int(index[0])] = gathered.flatten().tolist()
        index.zero_()
        gathered.zero_()
        left, right = model(a, b)
        return (left * right).sum(), len(left)

    train(batches((21,)), objective, shards=4)
    assert seen == {first: [*range(21)] for first in (0, 6, 11, 16)}


@pytest.mark.parametrize("devices", [1, 2])
def test_without_side_by_side_it_is_refused(devices):
    (batch,) = batches((16,))
    with opened(side_by_side=False, devices=devices) as trainer:
        before = trainer.fingerprint()
        with pytest.raises(ContractError, match=r"use Layout\(side_by_side=True\)"):
            trainer.step(*batch)
        with pytest.raises(ContractError, match=r"use Layout\(side_by_side=True\)"):
            trainer.evaluate([batch], {"loss": info_nce})
        assert trainer.steps_done == 0
        assert trainer.fingerprint() == before


def test_compiled_shards_cannot_gather():
    with pytest.raises(ContractError, match=r"use Layout\(side_by_side=True\)"):
        train(batches((16,)), side_by_side=False, compile=True)
    with pytest.raises(InputError, match="compile=True and side_by_side=True"):
        train([], compile=True)


@pytest.mark.parametrize("devices", [1, 3])
def test_metrics_over_the_whole_batch_can_be_evaluated(devices):
    data = batches((24, 9, 1), torch.float64)
    _, _, trainer = train([], dtype=torch.float64, devices=devices)
    with trainer, torch.no_grad():
        found = trainer.evaluate(data, {"loss": info_nce})["loss"]
        pairs = [info_nce(trainer.model, *batch) for batch in data]
        total, count = (sum(map(float, values)) for values in zip(*pairs, strict=True))
        assert found == pytest.approx(total / count, rel=1e-12)
        keys = trainer.predict(data[:1], lambda model, a, b, i: evenstep.all_gather(a)[i])
        assert keys.equal(data[0][0])


@pytest.mark.parametrize("devices", [1, 2])
def test_a_loss_that_gathers_is_judged_over_shards(devices):
    data = batches((32,), torch.float64)
    _, _, trainer = train(data, dtype=torch.float64, devices=devices)
    assert trainer._self_check.report.unjudged == ""

    def mean_of_means(model, a, b, index):
        total, count = info_nce(model, a, b, index)
        return total / count, 1

    with pytest.raises(ContractError, match="the loss does not add up over the shards"):
        train(data, mean_of_means, torch.float64, devices=devices)

    def own_keys_only(model, a, b, index):
        left, right = model(a, b)
        evenstep.all_gather(right)
        return F.cross_entropy(left @ right.T, index % 4, reduction="sum"), len(index)

    with pytest.raises(ContractError, match="the loss does not add up over the shards"):
        train(data, own_keys_only, torch.float64, devices=devices)


def sometimes(model, a, b, index):
    """Only the first shards gather."""
    left, right = model(a, b)
    keys = evenstep.all_gather(right) if index[0] < 8 else right
    return (left[:1] @ keys.T).sum(), len(index)


def never_backward(model, a, b, index):
    """All shards gather, and the loss of the first ones depends on it."""
    left, right = model(a, b)
    keys = evenstep.all_gather(right)
    return (left[:1] @ (keys if index[0] < 8 else right).T).sum(), len(index)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("objective", "place"),
    [(sometimes, "call 1 of all_gather"), (never_backward, "the backward pass of call 1")],
)
def test_shards_that_do_not_all_gather_are_refused(objective, place, devices):
    (batch,) = batches((32,))
    with pytest.raises(ContractError, match=rf"{place}.* was reached by shards 0, 1") as caught:
        train([batch], objective, devices=devices, check="off")
    assert "Every shard must make the same calls of evenstep.all_gather" in str(caught.value)


def other_shapes(model, a, b, index):
    return evenstep.all_gather(b[:, : 2 + (index[0] < 8)]).sum() + model.scale, len(index)


def other_dtypes(model, a, b, index):
    return evenstep.all_gather(b.double() if index[0] < 8 else b).sum() + model.scale, len(index)


def a_number(model, a, b, index):
    return evenstep.all_gather(b.sum()) + model.scale, len(index)


@pytest.mark.parametrize(
    ("objective", "told"),
    [
        (other_shapes, r"shard 0 brought rows of shape \(3,\) and .*shard 2 rows of shape \(2,\)"),
        (other_dtypes, r"shard 0 brought rows .* torch.float64, shard 2 .* torch.float32"),
        (a_number, "got a single number"),
    ],
)
def test_rows_that_cannot_be_concatenated_are_refused(objective, told):
    with pytest.raises(ContractError, match=told):
        train(batches((32,)), objective, check="off")


def test_a_lost_device_is_named_with_the_option():
    _, _, trainer = train([])
    with trainer:
        trainer._engine.lose(1)
        with pytest.raises(DeviceLostError, match="cpu:1 was lost, and with side_by_side=True"):
            trainer.step(*batches((32,))[0])


def test_it_is_no_part_of_the_experiment(tmp_path):
    data = batches((16, 16))
    expected, _, _ = train(data)
    train(data[:1])[2].save(tmp_path)
    model = Pairs(torch.float32)
    options = {"objective": info_nce, "devices": 3, "side_by_side": True}
    with evenstep.Trainer.load(
        tmp_path, model, SGD(model.parameters()), **grouped(**options)
    ) as resumed:
        resumed.step(*data[1])
    assert_same_bits(whole_state(model, resumed.optimizer), expected)


@pytest.mark.parametrize("option", [{"side_by_side": True}, {"batch_norm": "sync"}], ids=str)
def test_in_one_of_several_processes_it_is_refused_before_they_meet(option, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "test", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="and several processes, but .*: start one process"):
        open_trainer(nn.Linear(2, 2), **option)
