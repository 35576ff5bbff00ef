"""`partition="optimizer"` over processes: one result, whoever owns what."""

import json
import re
import signal
import sys

import pytest

from evenstep.checkpoint.files import latest_checkpoint, read_checkpoint
from evenstep.errors import CheckpointError
from launched import alone, apart, launched

CASES = ("optimizers", "models", "clipped", "grouped", "gathered")


def results_of(finished, out, rank):
    assert finished.returncode == 0, finished.stderr
    return json.loads((out / f"{rank}.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The results of one process on one device."""
    out = tmp_path_factory.mktemp("alone")
    return results_of(alone("owned.py", out, "whole", *CASES), out, 0)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_optimizer_and_model_keeps_its_bits(whole, processes, tmp_path):
    finished = launched(processes, "owned.py", tmp_path, "partition", *CASES)
    for rank in range(processes):
        found = results_of(finished, tmp_path, rank)
        for case in CASES:
            assert found[case] == whole[case], case


def run(processes, mode, out, case):
    """Return what one case gives in some processes, the same in all of them."""
    out.mkdir()
    job = ("owned.py", out, mode, case)
    finished = alone(*job) if processes == 1 else launched(processes, *job)
    found = [results_of(finished, out, rank)[case] for rank in range(processes)]
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "partition"), (1, "whole")),
        pytest.param((1, "whole"), (2, "partition"), marks=pytest.mark.slow),
        pytest.param((2, "partition"), (3, "partition"), marks=pytest.mark.slow),
        pytest.param((3, "partition"), (2, "whole"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_checkpoints_can_be_resumed_with_other_owners(before, after, tmp_path):
    folder = tmp_path / "kept"
    expected = run(*before, tmp_path / "before", f"saved:{folder}")
    latest = latest_checkpoint(folder)
    owners = before[0] - 1 if before[1] == "partition" else 0
    assert len([*latest.glob("owner-*.safetensors")]) == owners
    assert run(*after, tmp_path / "after", f"resumed:{folder}")[1] == expected
    for file in latest.iterdir():
        kept = file.read_bytes()
        file.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        with pytest.raises(CheckpointError):
            read_checkpoint(latest)
        file.write_bytes(kept)
    for file in latest.glob("owner-*"):
        file.unlink()
        with pytest.raises(CheckpointError, match=f"lacks {file.name}"):
            read_checkpoint(latest)


@pytest.mark.timeout(240)
def test_memory_at_rest_falls_from_16_to_4_and_12_shared_bytes_a_parameter(tmp_path):
    """Every tensor counts that is there after a step, whatever holds it."""
    finished = launched(2, "owned.py", tmp_path, "partition", "memory")
    for rank in range(2):
        (nbytes,) = results_of(finished, tmp_path, rank)["memory"]
        assert 10 <= nbytes < 10 * 1.05


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_model_that_needs_more_memory_than_a_process_may_have_trains_in_two(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # freed memory goes back to the system
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    finished = launched(2, "owned.py", tmp_path, "partition", "limited")
    assert results_of(finished, tmp_path, 0)["limited"] == [True] * 3
    finished = launched(2, "owned.py", tmp_path, "whole", "limited")
    assert finished.returncode != 0
    assert re.search("allocate memory|MemoryError|can't start new thread", finished.stderr)


@pytest.mark.timeout(240)
def test_an_error_of_one_owner_before_the_update_leaves_all_models_as_they_were(tmp_path):
    finished = launched(2, "owners_fail.py", tmp_path, "before_update")
    first, second = (results_of(finished, tmp_path, rank) for rank in range(2))
    assert second == {"error": "ValueError: no", "steps": 1, "same": True}
    assert re.fullmatch(r"PeerError: rank 1 \(on .*\) failed: ValueError: no", first["error"])
    assert (first["steps"], first["same"]) == (1, True)


def test_an_owner_that_cannot_write_leaves_the_earlier_checkpoint(tmp_path):
    finished = launched(2, "owners_fail.py", tmp_path, "full")
    for rank in range(2):
        message = results_of(finished, tmp_path, rank)["error"]
        assert message.startswith("SaveError: rank 1 (on ")
        assert "No space left on device" in message
    assert_only_the_first_is_kept(tmp_path / "kept")


def test_an_owner_that_is_killed_leaves_the_earlier_checkpoint(tmp_path):
    ended = apart("owners_fail.py", tmp_path, "killed")
    assert ended[1][0] == -signal.SIGKILL
    message = json.loads((tmp_path / "0.json").read_text())["error"]
    assert message.startswith("PeerError: rank 1 has left")
    assert_only_the_first_is_kept(tmp_path / "kept")


def assert_only_the_first_is_kept(folder):
    assert [one.name for one in folder.iterdir()] == ["step-00000001"]
    assert read_checkpoint(folder)["steps_done"] == 1
