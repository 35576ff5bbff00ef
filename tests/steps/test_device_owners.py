"""`partition="optimizer"` on the devices of one process: they update side by side."""

import functools
import math
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import evenstep
from evenstep.collectives import deal
from evenstep.devices import Device
from evenstep.engine import InlineLanes, ThreadLanes
from evenstep.errors import ClosedError, InputError
from evenstep.replicas import Replicas
from evenstep.steps.owners.partition import Partition
from evenstep.steps.owners.update import OwnedUpdate
from layouts import DelayedLanes, mixed, own
from owned_optimizers import OPTIMIZERS, model_of
from reference import assert_same_bits, reference_training, whole_state
from zoo import ZOO, build, make_batches, options_of

BATCHES = make_batches((33, 16, 24))


def trained(model, make_optimizer, devices, **options):
    optimizer = make_optimizer(model.parameters())
    options = {"memory_format": "contiguous", "partition": "optimizer", **options}
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), devices=devices, **options_of(model), **options
    ) as trainer:
        losses = [float(loss) for loss in [trainer.step(X, y) for X, y in BATCHES]]
        return whole_state(model, optimizer), losses, trainer


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("devices", [own(2), own(3)], ids=["two", "three"])
def test_every_optimizer_keeps_its_bits(name, devices):
    expected, losses = reference_training(model_of(name), OPTIMIZERS[name], BATCHES, shards=8)
    state, found, _ = trained(model_of(name), OPTIMIZERS[name], devices)
    assert_same_bits(state, expected)
    assert found == losses


ADAM = functools.partial(torch.optim.Adam, lr=0.01)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("name", ZOO)
def test_every_model_keeps_its_bits(name, in_flight):
    expected, losses = reference_training(build(name), ADAM, BATCHES, shards=8)
    state, found, _ = trained(build(name), ADAM, own(2), max_in_flight=in_flight)
    assert_same_bits(state, expected)
    assert found == losses


@pytest.mark.parametrize("lanes", [ThreadLanes, InlineLanes, DelayedLanes])
@pytest.mark.parametrize("devices", [1, 2, mixed(3), own(2)], ids=str)
def test_on_any_devices(devices, lanes):
    expected, _ = reference_training(build("convolution"), ADAM, BATCHES, shards=8)
    state, _, _ = trained(build("convolution"), ADAM, devices, lanes=lanes)
    assert_same_bits(state, expected)


@pytest.mark.parametrize("devices", [2, own(2)], ids=["shared", "own"])
def test_each_device_updates_its_own_share(devices):
    """The optimizer steps once in each lane."""
    seen = []

    class Seen(torch.optim.SGD):
        def step(self, closure=None):
            held = [one for group in self.param_groups for one in group["params"]]
            numbers = sum(one.numel() for one in held if one.grad is not None)
            seen.append((threading.current_thread().name, numbers))
            super().step()

    model = build("convolution")
    _, _, trainer = trained(model, lambda given: Seen(given, lr=0.1), devices)
    parameters = [*trainer.model.parameters()]
    owner_of = deal([one.nbytes for one in parameters], 2)
    share = [
        sum(one.numel() for one, owner in zip(parameters, owner_of, strict=True) if owner == n)
        for n in range(2)
    ]
    assert sorted(numbers for _, numbers in seen[-2:]) == sorted(share)
    assert len({name for name, _ in seen[-2:]}) == 2


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_hooks_see_all_gradients_and_may_change_them(clip_norm):
    def halve(module):
        for one in module.parameters():
            one.grad.mul_(0.5)

    def mean(module):
        with torch.no_grad():
            for one in module.parameters():
                one.mul_(0.999)

    options = {"before_update": halve, "after_update": mean, "clip_norm": clip_norm}
    expected, losses, _ = trained(build("convolution"), ADAM, 1, **options)
    state, found, trainer = trained(build("convolution"), ADAM, own(3), **options)
    assert_same_bits(state, expected)
    assert found == losses
    assert all(one.grad is not None for one in trainer.model.parameters())


def test_groups_schedulers_frozen_parameters_and_resume_on_other_memories(tmp_path):
    def run(devices, folder, others):
        model = build("convolution")
        first, *rest = model.parameters()
        first.requires_grad_(False)
        optimizer = torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": rest}], lr=0.01)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        options = {"scheduler": scheduler, "partition": "optimizer"}
        loss = nn.CrossEntropyLoss()
        with evenstep.Trainer(model, optimizer, loss, devices=devices, **options) as trainer:
            for X, y in BATCHES[:2]:
                trainer.step(X, y)
                scheduler.step()
            trainer.save(folder)
        model.load_state_dict(build("convolution", seed=1).state_dict())
        with evenstep.Trainer.load(
            folder, model, optimizer, loss, devices=others, **options
        ) as trainer:
            first.requires_grad_(True)
            trainer.step(*BATCHES[2])
            return trainer.fingerprint(2)

    expected = run(1, tmp_path / "one", 1)
    assert run(own(2), tmp_path / "two", own(3)) == expected
    assert run(own(2), tmp_path / "whole", 1) == expected


SHAPES = st.lists(st.integers(1, 9), max_size=3)
MATRICES = st.lists(st.integers(1, 9), min_size=2, max_size=2)


@st.composite
def optimized(draw):
    name = draw(st.sampled_from([*OPTIMIZERS]))
    shapes = draw(st.lists(MATRICES if name.startswith("Muon") else SHAPES, min_size=1, max_size=7))
    return name, shapes, draw(st.integers(0, len(shapes) - 1))


@settings(max_examples=20, deadline=None)
@given(given=optimized(), devices=st.integers(2, 4))
def test_any_shapes_keep_their_bits(given, devices):
    """With a parameter that has no gradient in the second step."""
    name, shapes, unused = given

    def results(devices, partition):
        torch.manual_seed(0)
        model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
        optimizer = OPTIMIZERS[name](model.parameters())

        def objective(model, X, skips):
            used = [
                one for i, one in enumerate(model) if i != unused or not skips or len(model) < 2
            ]
            return sum((one.sin() * X.sum()).sum() for one in used), len(X)

        with evenstep.Trainer(
            model, optimizer, objective=objective, devices=devices, partition=partition,
            shards=4, check="off", clip_norm=1.0,
        ) as trainer:  # fmt: skip
            for skips in (False, True, False):
                trainer.step(torch.linspace(-1, 2, 8), skips)
            return whole_state(model, optimizer)

    assert_same_bits(results(devices, "optimizer"), results(1, None))


class Fails(torch.optim.SGD):
    """It fails where a gradient is NaN."""

    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None and one.grad.isnan().any():
                    raise ArithmeticError("not a number")
        super().step()


def test_an_error_on_one_device_is_raised_and_leaves_the_gradients():
    def spoil(module):
        [*module.parameters()][-1].grad.fill_(math.nan)

    model = build("convolution")
    optimizer = Fails(model.parameters(), lr=0.1)
    with evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), devices=own(2), partition="optimizer",
        before_update=spoil,
    ) as trainer:  # fmt: skip
        with pytest.raises(ArithmeticError, match="not a number"):
            trainer.step(*BATCHES[0])
        assert trainer.steps_done == 0


def test_gpus_are_refused_so_far():
    model = build("convolution")
    optimizer = ADAM(model.parameters())
    update = OwnedUpdate(optimizer, Replicas(model, [Device("cpu", 0)]), None, None)
    engine = SimpleNamespace(devices=[Device("cuda", 0)])
    with pytest.raises(InputError, match=r"got partition='optimizer' and cuda:0"):
        Partition(model, optimizer, update._replicas, engine, update, None)


class Failing(torch.optim.SGD):
    """Fails once, in the lane that updates the last parameter, when others have updated theirs."""

    fails = False

    def step(self, closure=None):
        loss = super().step(closure)
        held = [
            one for group in self.param_groups for one in group["params"] if one.grad is not None
        ]
        if Failing.fails and any(one.numel() == 5 for one in held):
            raise ValueError("no")
        return loss


def test_an_error_in_one_lane_leaves_half_a_step_which_nothing_goes_on_from(tmp_path, monkeypatch):
    model = build("convolution")
    optimizer = Failing(model.parameters(), lr=0.1)
    given = {"devices": own(2), "partition": "optimizer"}
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **given) as trainer:
        trainer.step(*BATCHES[0])
        trainer.save(tmp_path)
        expected = trainer.fingerprint()
        monkeypatch.setattr(Failing, "fails", True)
        with pytest.raises(ValueError, match="no"):
            trainer.step(*BATCHES[1])
        monkeypatch.setattr(Failing, "fails", False)
        calls = [
            lambda: trainer.step(*BATCHES[1]),
            lambda: trainer.save(tmp_path),
            lambda: trainer.save(tmp_path, background=True),
            trainer.fingerprint,
            trainer.optimizer.state_dict,
        ]
        for call in calls:
            with pytest.raises(
                ClosedError, match="step 1 failed .* between two steps: load the last"
            ):
                call()
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000001"]
    with evenstep.Trainer.load(tmp_path, model, optimizer, nn.CrossEntropyLoss(), **given) as again:
        assert again.fingerprint() == expected
        again.step(*BATCHES[1])


@pytest.mark.parametrize("hook", ["before_update", "after_update"])
def test_an_error_beside_the_update_leaves_whole_steps(hook, tmp_path):
    """What the lanes have not begun, or have all done, is no half step."""
    model, failing = build("convolution"), [False]

    def may_fail(_):
        if failing[0]:
            raise ValueError("no")

    given = {"devices": own(2), "partition": "optimizer", hook: may_fail}
    optimizer = ADAM(model.parameters())
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), **given) as trainer:
        trainer.step(*BATCHES[0])
        failing[0] = True
        with pytest.raises(ValueError, match="no"):
            trainer.step(*BATCHES[1])
        failing[0] = False
        trainer.step(*BATCHES[1])
        trainer.save(tmp_path)
