"""Which parameters are frozen decides what the next steps train: a checkpoint holds it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.errors import CheckpointError
from trainers import sgd

X, Y = torch.randn(24, 12, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 5


def parts(*, frozen):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 5))
    model[0].requires_grad_(not frozen)
    return model, sgd(model)


def saved(folder, *, frozen):
    model, optimizer = parts(frozen=not frozen)
    with evenstep.Trainer(model, optimizer, F.cross_entropy, devices=1) as trainer:
        trainer.step(X, Y)
        model[0].requires_grad_(not frozen)
        trainer.step(X, Y)
        trainer.save(folder)
        trainer.step(X, Y)
        return trainer.fingerprint()


@pytest.mark.parametrize("frozen", [True, False])
def test_a_model_that_is_frozen_otherwise_is_refused_and_unchanged(frozen, tmp_path):
    saved(tmp_path, frozen=frozen)
    model, optimizer = parts(frozen=not frozen)
    before = [one.clone() for one in model.parameters()]
    now, then = str(frozen), str(not frozen)
    named = rf"requires_grad of 0\.weight {now} instead of {then}, .* of 0\.bias"
    with pytest.raises(CheckpointError, match=named):
        evenstep.Trainer.load(tmp_path, model, optimizer, F.cross_entropy)
    assert all(map(torch.equal, before, model.parameters()))
    assert all(one.requires_grad == frozen for one in model[0].parameters())


@pytest.mark.parametrize("frozen", [True, False])
def test_training_resumes_with_the_same_parameters_frozen(frozen, tmp_path):
    uninterrupted = saved(tmp_path, frozen=frozen)
    given = parts(frozen=frozen)
    with evenstep.Trainer.load(tmp_path, *given, F.cross_entropy, devices=2) as trainer:
        trainer.step(X, Y)
        assert trainer.fingerprint() == uninterrupted
