"""The record of a training: its JSON keys and their order, and reading it back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.cli.training.record import TrainRecord

KEYS = [
    "model",
    "data",
    "devices",
    "shards",
    "batch_size",
    "epochs",
    "steps",
    "seed",
    "train_loss",
    "test_accuracy",
    "seconds_per_epoch",
    "examples_per_second",
    "fingerprint",
    "fingerprint_2",
    "within_rounding",
    "facts",
]

counts = st.integers(min_value=0, max_value=2**63 - 1)
numbers = st.floats(allow_nan=False, allow_infinity=False)
records = st.builds(
    TrainRecord,
    model=st.text(),
    data=st.text(),
    devices=st.lists(st.text()).map(tuple),
    shards=counts,
    batch_size=counts,
    epochs=counts,
    steps=counts,
    seed=counts,
    train_loss=st.none() | numbers,
    test_accuracy=numbers,
    seconds_per_epoch=st.none() | numbers,
    examples_per_second=st.none() | numbers,
    fingerprint=st.text(),
    fingerprint_2=st.text(),
    within_rounding=st.booleans(),
    facts=st.dictionaries(st.text(), st.dictionaries(st.text(), st.none() | st.text() | counts)),
)


@given(records)
def test_what_is_written_is_read_back(record):
    assert TrainRecord.from_json(record.to_json()) == record


@given(records)
def test_the_json_object_has_these_keys_in_this_order(record):
    assert list(json.loads(record.to_json())) == KEYS


def a_record(**changes):
    values = {
        "model": "mlp",
        "data": "digits",
        "devices": ("cpu:0", "cpu:1"),
        "shards": 8,
        "batch_size": 256,
        "epochs": 2,
        "steps": 12,
        "seed": 0,
        "train_loss": 2.25,
        "test_accuracy": 0.5,
        "seconds_per_epoch": 1.5,
        "examples_per_second": 1000.0,
        "fingerprint": "0" * 64,
        "fingerprint_2": "1" * 64,
        "within_rounding": False,
        "facts": {"layers": {"layer 1": "ReLU()"}},
    }
    return TrainRecord(**{**values, **changes})


def test_devices_are_a_list_in_json():
    assert json.loads(a_record().to_json())["devices"] == ["cpu:0", "cpu:1"]


def test_a_record_is_one_line():
    assert "\n" not in a_record(model="two\nlines").to_json()


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
