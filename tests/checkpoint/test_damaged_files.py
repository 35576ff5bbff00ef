"""A checkpoint that is damaged, forged or no checkpoint is refused by name."""

import json
import os
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_codec import same

import evenstep.checkpoint.codec
import evenstep.checkpoint.files
from checkpoints import FILES, TREE, write_checkpoint
from evenstep.checkpoint.files import latest_checkpoint, list_checkpoints, read_checkpoint
from evenstep.errors import CheckpointError


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("run"), TREE, step=40)


def assert_refused(folder, path, change):
    """Check that `path` with `change(bytes)` is refused in a line that names it."""
    whole = path.read_bytes()
    changed = change(whole)
    assert changed != whole
    path.write_bytes(changed)
    try:
        with pytest.raises(CheckpointError, match=re.escape(str(path))) as caught:
            read_checkpoint(folder)
        assert "\n" not in str(caught.value)
    finally:
        path.write_bytes(whole)


def flip(place, mask):
    return lambda whole: whole[:place] + bytes([whole[place] ^ mask]) + whole[place + 1 :]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_flipped_byte_is_found(written, data):
    path = written / data.draw(st.sampled_from(FILES))
    place = data.draw(st.integers(0, path.stat().st_size - 1))
    assert_refused(written, path, flip(place, data.draw(st.integers(1, 255))))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_truncation_and_addition_is_found(written, data):
    path = written / data.draw(st.sampled_from(FILES))
    length = data.draw(st.integers(0, path.stat().st_size - 1))
    assert_refused(written, path, lambda whole: whole[:length])
    assert_refused(written, path, lambda whole: whole + whole[length:])


def test_every_letter_of_the_manifest_counts(written):
    """Even those that mean the same in JSON: blanks, line ends, the case of hexadecimals."""
    path = written / "manifest.json"
    for place, letter in enumerate(path.read_bytes()):
        if chr(letter).isalpha() or chr(letter).isspace():
            swapped = {ord(" "): ord(" ") ^ ord("\t"), ord("\n"): ord("\n") ^ ord("\r")}
            assert_refused(written, path, flip(place, swapped.get(letter, 0x20)))


@pytest.fixture
def two(tmp_path):
    """Checkpoints of the steps 20 and 40."""
    for step in (20, 40):
        write_checkpoint(tmp_path, TREE, step=step)
    return tmp_path


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named_with_the_earlier_checkpoint(two, file):
    (two / "step-00000040" / file).unlink()
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(two)
    line = f"{two / 'step-00000040'} lacks {file}; use the earlier {two / 'step-00000020'}"
    assert str(caught.value) == line
    assert same(read_checkpoint(two / "step-00000020"), TREE)


def test_damage_to_the_first_checkpoint_says_that_there_is_no_earlier_one(two):
    (two / "step-00000020" / "tensors.safetensors").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"has 0 bytes, but .* there is no earlier one beside it"
    ):
        read_checkpoint(two / "step-00000020")


def test_a_checkpoint_that_does_not_exist_is_named(two):
    with pytest.raises(CheckpointError, match=r"step-00000030 is not there; use the earlier .*20"):
        read_checkpoint(two / "step-00000030")


@pytest.mark.parametrize("text", ["{}", "[1]", '{"format": "pt"}', "1", '"evenstep checkpoint"'])
def test_a_foreign_manifest_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest.json is not the manifest of an evenstep"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe\xfd", b"[" * 100_000])
def test_a_manifest_that_is_not_json_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"manifest.json is truncated, damaged or not even"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("nbytes", [1 << 28, 1 << 42], ids=["too long", "terabytes"])
def test_a_manifest_that_promises_too_much_is_refused_before_it_is_read(two, nbytes):
    path = two / "step-00000040" / "manifest.json"
    os.truncate(path, nbytes + 1)
    with pytest.raises(CheckpointError, match=r"it has more than 268,435,456 bytes"):
        read_checkpoint(two)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_refused_at_once(two, file, make):
    (two / "step-00000040" / file).unlink()
    make(two / "step-00000040" / file)
    with pytest.raises(CheckpointError):
        read_checkpoint(two)


def test_an_endless_device_is_refused_at_once(two):
    path = two / "step-00000040" / "manifest.json"
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="it is not a regular file"):
        read_checkpoint(two)


def seal_again(folder, **changes):
    """Write the manifest in `folder` with other fields and a hash that fits, as a forger would."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text()) | changes
    manifest.pop("sha256")
    body = evenstep.checkpoint.files._spell_fields(manifest)
    path.write_bytes(evenstep.checkpoint.files._seal(body))


def test_a_newer_version_is_refused_with_the_release_that_reads_it(two):
    seal_again(two / "step-00000040", version=3, evenstep="9.8.7")
    with pytest.raises(
        CheckpointError, match=r"version 3, but .* versions up to 2: .* evenstep 9\.8\.7"
    ):
        read_checkpoint(two)


@pytest.mark.parametrize(
    "changes",
    [
        {"state": {"$unknown": 1}},
        {"state": {"$tensor": {"name": "x", "dtype": "float32", "shape": [], "strides": []}}},
        {"files": {}},
        {"files": 1},
        {"files": {"tensors.safetensors": 1}},
    ],
    ids=json.dumps,
)
def test_a_forged_manifest_is_refused(two, changes):
    seal_again(two / "step-00000040", **changes)
    with pytest.raises(CheckpointError, match=r"step-00000040.*; use the earlier .*step-00000020"):
        read_checkpoint(two)


def test_a_folder_of_another_program_is_refused(tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"holds config\.json, model\.safetensors; give"):
        read_checkpoint(tmp_path)


def test_a_folder_without_checkpoints_is_refused_with_its_contents(tmp_path):
    (tmp_path / "file").touch()
    assert list_checkpoints(tmp_path / "nothing") == list_checkpoints(tmp_path / "file") == []
    with pytest.raises(CheckpointError, match="there is no such folder"):
        read_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="it is a file"):
        latest_checkpoint(tmp_path / "file")
    with pytest.raises(CheckpointError, match="holds file"):
        latest_checkpoint(tmp_path)
