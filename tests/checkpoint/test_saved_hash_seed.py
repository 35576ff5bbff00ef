"""A checkpoint knows the seed of Python's hashes, and resuming with another one is said once."""

import logging

import pytest
from torch import nn

import evenstep
from evenstep.checkpoint.files import read_checkpoint
from resuming import rewritten
from trainers import open_trainer, sgd
from zoo import build, make_batches

BATCH = make_batches((16,))[0]


def save(folder):
    with open_trainer(build("convolution"), devices=1) as trainer:
        trainer.step(*BATCH)
        trainer.save(folder)


def lines_of_resuming(folder, caplog):
    caplog.clear()
    caplog.set_level(logging.WARNING, "evenstep")
    model = build("convolution")
    given = model, sgd(model), nn.CrossEntropyLoss()
    with evenstep.Trainer.load(folder, *given, devices=1) as trainer:
        trainer.step(*BATCH)
    return [text for text in caplog.messages if "PYTHONHASHSEED" in text]


def has_seed(monkeypatch, seed):
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)


@pytest.mark.parametrize(
    ("saved", "now", "is_said"),
    [
        ("0", None, True),
        ("0", "7", True),
        (None, "0", True),
        ("random", "0", True),
        ("0", "0", False),
        (None, None, False),
        (None, "random", False),
    ],
)
def test_another_seed_is_said_once(tmp_path, monkeypatch, caplog, saved, now, is_said):
    has_seed(monkeypatch, saved)
    save(tmp_path)
    has_seed(monkeypatch, now)
    said = f"PYTHONHASHSEED {now or 'random'} instead of {saved or 'random'}"
    assert [said in line for line in lines_of_resuming(tmp_path, caplog)] == [True] * is_said


def test_a_checkpoint_without_a_seed_is_one_of_an_unknown_seed(tmp_path, monkeypatch, caplog):
    """Those of earlier versions have none."""
    has_seed(monkeypatch, None)
    save(tmp_path)
    assert "hash_seed" in read_checkpoint(tmp_path)
    rewritten(tmp_path, lambda tree: tree.pop("hash_seed"))
    has_seed(monkeypatch, "0")
    assert not lines_of_resuming(tmp_path, caplog)
