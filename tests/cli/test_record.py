"""The record of a training: its JSON keys and their order, and reading it back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.cli.training.loop import processes_and_machines
from evenstep.cli.training.record import TrainRecord

KEYS = [
    *("model", "data", "devices", "shards", "batch_size", "epochs", "steps", "seed"),
    *("train_loss", "test_accuracy", "seconds_per_epoch", "examples_per_second"),
    *("fingerprint", "fingerprint_2", "within_rounding", "facts", "processes", "machines"),
]

numbers = st.floats(allow_nan=False, allow_infinity=False)
records = st.builds(
    TrainRecord,
    train_loss=st.none() | numbers,
    test_accuracy=numbers,
    seconds_per_epoch=st.none() | numbers,
    examples_per_second=st.none() | numbers,
    facts=st.dictionaries(
        st.text(), st.dictionaries(st.text(), st.none() | st.text() | st.integers())
    ),
)


@given(records)
def test_what_is_written_is_read_back_from_these_keys_in_this_order(record):
    text = record.to_json()
    assert TrainRecord.from_json(text) == record
    assert list(json.loads(text)) == KEYS


def a_record(**changes):
    values = dict(zip(KEYS, ("mlp", "digits", ("cpu:0", "cpu:1"), 8, 256, 2, 12, 0), strict=False))
    values |= dict(zip(KEYS[8:], (2.25, 0.5, 1.5, 1e3, "0" * 64, "1" * 64, False), strict=False))
    values["facts"] = {"layers": {"layer 1": "ReLU()"}}
    return TrainRecord(**{**values, **changes})


def test_a_record_is_one_line_with_a_list_of_devices():
    text = a_record(model="two\nlines").to_json()
    assert "\n" not in text
    assert json.loads(text)["devices"] == ["cpu:0", "cpu:1"]


def test_nan_is_not_json():
    with pytest.raises(ValueError, match="JSON"):
        a_record(train_loss=float("nan")).to_json()


def test_a_record_is_frozen_and_given_by_keyword():
    with pytest.raises(AttributeError):
        a_record().steps = 3
    with pytest.raises(TypeError):
        TrainRecord("mlp", "digits")


def test_a_record_of_version_0_1_0_is_read():
    values = json.loads(a_record().to_json())
    del values["fingerprint_2"], values["facts"]
    assert TrainRecord.from_json(json.dumps(values)) == a_record(fingerprint_2="", facts={})


@pytest.mark.parametrize(
    ("agents", "machines"),
    [
        ("2", 2),  # as torchrun counts them, whatever this machine has
        (None, 3),  # by the processes of this one: 5 in pairs
    ],
)
def test_machines_are_those_of_the_launcher(agents, machines, monkeypatch):
    variables = {"TORCHELASTIC_RUN_ID": "job", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GROUP_WORLD_SIZE", raising=False)
    if agents:
        monkeypatch.setenv("GROUP_WORLD_SIZE", agents)
    assert processes_and_machines() == {"processes": 5, "machines": machines}
