"""`Owners` in one process, which owns everything: the same steps, and refusals."""

import functools

import pytest
import torch
from torch import nn

import evenstep
from grouping import grouped
from layouts import DelayedLanes, mixed, own
from reference import assert_same_bits, reference_training, whole_state
from zoo import build, make_batches, options_of

BATCHES = make_batches((33, 16, 24))


def trained(model, make_optimizer, devices, **options):
    optimizer = make_optimizer(model.parameters())
    options = {"memory_format": "contiguous", "divide": evenstep.Owners(), **options}
    with evenstep.Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        **grouped(devices=devices, **options_of(model), **options),
    ) as trainer:
        losses = [float(loss) for loss in [trainer.step(X, y) for X, y in BATCHES]]
        return whole_state(model, optimizer), losses, trainer


ADAM = functools.partial(torch.optim.Adam, lr=0.01)


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("devices", [1, 2, mixed(3), own(2)], ids=str)
def test_on_any_devices(devices, max_in_flight):
    expected, losses = reference_training(build("convolution"), ADAM, BATCHES, shards=8)
    state, found, _ = trained(
        build("convolution"), ADAM, devices, lanes=DelayedLanes, max_in_flight=max_in_flight
    )
    assert_same_bits(state, expected)
    assert found == losses


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
        options = {"scheduler": scheduler, "divide": evenstep.Owners()}
        loss = nn.CrossEntropyLoss()
        with evenstep.Trainer(
            model, optimizer, loss, **grouped(devices=devices, **options)
        ) as trainer:
            for X, y in BATCHES[:2]:
                trainer.step(X, y)
                scheduler.step()
            trainer.save(folder)
        model.load_state_dict(build("convolution", seed=1).state_dict())
        with evenstep.Trainer.load(
            folder, model, optimizer, loss, **grouped(devices=others, **options)
        ) as trainer:
            first.requires_grad_(True)
            trainer.step(*BATCHES[2])
            return trainer.fingerprint(2)

    expected = run(1, tmp_path / "one", 1)
    assert run(own(2), tmp_path / "two", own(3)) == expected
    assert run(own(2), tmp_path / "whole", 1) == expected
