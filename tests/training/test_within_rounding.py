"""Results that are equal to those of other devices within rounding only, and say so."""

import torch
from torch import nn

import evenstep
from zoo import build, make_batches

MIXED = [evenstep.Device("cpu", 0), evenstep.Device("cpu", 1, threads=2)]
ROUNDING = "results are equal within rounding, not bit for bit"


def parts():
    model = build("convolution")
    return model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()


def saved(folder, devices):
    with evenstep.Trainer(*parts(), devices=devices) as trainer:
        for batch in make_batches([16]):
            trainer.step(*batch)
        trainer.save(folder)
    return trainer


def test_a_checkpoint_of_mixed_devices_stays_within_rounding_on_any_devices(tmp_path):
    assert saved(tmp_path, MIXED).within_rounding
    for folder in (tmp_path, tmp_path / "again"):
        trainer = evenstep.Trainer.load(folder, *parts(), devices=1)
        assert trainer.within_rounding
        (note,) = trainer.notes
        assert note.endswith(ROUNDING)
        trainer.save(tmp_path / "again")


def test_a_checkpoint_of_devices_of_one_kind_is_exact(tmp_path):
    assert not saved(tmp_path, 2).within_rounding
    trainer = evenstep.Trainer.load(tmp_path, *parts(), devices=1)
    assert not trainer.within_rounding
    assert not trainer.notes
