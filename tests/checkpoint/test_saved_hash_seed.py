"""A checkpoint knows the seed of Python's hashes, and resuming with another one is said once."""

import logging

import pytest
from torch import nn

import evenstep
from evenstep.checkpoint.files import read_checkpoint
from resuming import rewritten
from trainers import sgd
from zoo import build, make_batches

BATCH = make_batches((16,))[0]


def save(folder):
    model = build("convolution")
    with evenstep.Trainer(model, sgd(model), nn.CrossEntropyLoss(), devices=1) as trainer:
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


@pytest.mark.parametrize(("saved", "now"), [("0", None), ("0", "7"), (None, "0"), ("random", "0")])
def test_another_seed_is_said_once(tmp_path, monkeypatch, caplog, saved, now):
    has_seed(monkeypatch, saved)
    save(tmp_path)
    has_seed(monkeypatch, now)
    (line,) = lines_of_resuming(tmp_path, caplog)
    assert f"PYTHONHASHSEED {now or 'random'} instead of {saved or 'random'}" in line


@pytest.mark.parametrize(("saved", "now"), [("0", "0"), (None, None), (None, "random")])
def test_the_same_seed_and_none_in_both_are_not_mentioned(
    tmp_path, monkeypatch, caplog, saved, now
):
    has_seed(monkeypatch, saved)
    save(tmp_path)
    has_seed(monkeypatch, now)
    assert not lines_of_resuming(tmp_path, caplog)


def test_a_checkpoint_without_a_seed_is_one_of_an_unknown_seed(tmp_path, monkeypatch, caplog):
    """Those of earlier versions have none."""
    has_seed(monkeypatch, None)
    save(tmp_path)
    assert "hash_seed" in read_checkpoint(tmp_path)
    rewritten(tmp_path, lambda tree: tree.pop("hash_seed"))
    has_seed(monkeypatch, "0")
    assert not lines_of_resuming(tmp_path, caplog)
