"""The options that `evenstep train` keeps beside its checkpoints."""

import contextlib
import json

import pytest

from evenstep.cli.options.training import ExperimentOptions
from evenstep.cli.training.runfile import NAME, read_run_file, write_run_file
from evenstep.errors import CheckpointError


@pytest.fixture
def written(tmp_path):
    write_run_file(tmp_path, ExperimentOptions(lr=0.25, batch_size=48))
    return tmp_path / NAME


def test_every_flipped_bit_is_refused_or_changes_nothing(written):
    content, options = written.read_bytes(), read_run_file(written.parent)
    harmless = 0
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        written.write_bytes(damaged)
        with contextlib.suppress(CheckpointError):
            assert read_run_file(written.parent) == options
            harmless += 1
    assert harmless < 100  # blanks between the values


def test_a_file_without_a_digest_is_read_as_before(written):
    values = json.loads(written.read_text())
    options = read_run_file(written.parent)
    del values["sha256"]
    written.write_text(json.dumps(values))
    assert read_run_file(written.parent) == options


def test_a_key_that_evenstep_does_not_write_is_refused(written):
    values = json.loads(written.read_text())
    values["sha257"] = values.pop("sha256")
    written.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="is damaged"):
        read_run_file(written.parent)
