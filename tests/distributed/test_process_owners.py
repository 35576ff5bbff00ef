"""`Owners` over processes: one result, whoever owns what."""

import functools
import json
import re
import signal
import sys

import pytest

from evenstep.checkpoint.files import latest_checkpoint, read_checkpoint
from evenstep.errors import CheckpointError
from launched import alone, apart, launched
from marks import slow

CASES = ("optimizers", "models:2", "clipped", "in_groups", "gathered", "two_steps")


def results_of(finished, out, rank):
    assert finished.returncode == 0, finished.stderr
    return json.loads((out / f"{rank}.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The results of one process on one device, by their cases."""

    @functools.cache
    def results(*cases):
        out = tmp_path_factory.mktemp("alone")
        return results_of(alone("owned.py", out, "whole", *cases), out, 0)

    return results


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("processes", "cases"), [(2, CASES), slow(2, ("models:1",)), slow(3, (*CASES, "models:1"))]
)
@pytest.mark.slow
def test_any_optimizer_and_model_keeps_its_bits(whole, processes, cases, tmp_path):
    finished = launched(processes, "owned.py", tmp_path, "partition", *cases)
    for rank in range(processes):
        found = results_of(finished, tmp_path, rank)
        for case in cases:
            assert found[case] == whole(*cases)[case], case


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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_training_that_is_killed_again_and_again_ends_as_an_undisturbed_one(tmp_path):
    """Each time it goes on with other owners; the number is the step that it is killed in."""
    chain = [
        (2, "partition", 2),
        (3, "partition", 4),
        (2, "partition", 5),
        (1, "whole", 6),
        (2, "partition", 8),
        (2, "whole", 9),
    ]
    expected = run(1, "whole", tmp_path / "undisturbed", f"killed:{tmp_path / 'one'}:0")
    folder = tmp_path / "kept"
    for processes, mode, step in chain:
        out = tmp_path / f"killed {step}"
        out.mkdir()
        job = ("owned.py", out, mode, f"killed:{folder}:{step}")
        finished = alone(*job) if processes == 1 else launched(processes, *job)
        assert finished.returncode != 0
        assert not [*out.iterdir()]
        kept = int(latest_checkpoint(folder).name.removeprefix("step-"))
        # Without owners the first process alone saves, which may end the step before it is stopped.
        assert kept == step - 1 or (mode == "whole" and kept == step)
    assert run(3, "partition", tmp_path / "end", f"killed:{folder}:0") == expected


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_memory_at_rest_falls_from_16_to_4_and_12_shared_bytes_a_parameter(tmp_path):
    """Every tensor counts that is there after a step, whatever holds it."""
    finished = launched(2, "owned.py", tmp_path, "partition", "memory")
    for rank in range(2):
        (nbytes,) = results_of(finished, tmp_path, rank)["memory"]
        assert 10 <= nbytes < 10 * 1.05


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_model_that_needs_more_memory_than_a_process_may_have_trains_in_two(tmp_path):
    malloc = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}  # keeps nothing freed
    for case in ("limited", "limited:stages"):
        finished = launched(2, "owned.py", tmp_path, "partition", case, **malloc)
        assert results_of(finished, tmp_path, 0)[case] == [True] * 3
    finished = launched(2, "owned.py", tmp_path, "whole", "limited", **malloc)
    assert finished.returncode != 0
    assert re.search("allocate memory|MemoryError|can't start new thread", finished.stderr)


@pytest.mark.timeout(240)
def test_an_error_of_one_owner_ends_the_step_in_all(whole, tmp_path):
    """What was not begun is not done; a step that some owners have taken is not gone on with."""
    finished = launched(2, "owners_fail.py", tmp_path, "errors")
    first, second = (results_of(finished, tmp_path, rank) for rank in range(2))
    assert second["before_update"] == {"error": "ValueError: no", "steps": 1, "same": True}
    message = first["before_update"].pop("error")
    assert re.fullmatch(r"PeerError: rank 1 \(on .*\) failed: ValueError: no", message)
    assert first["before_update"] == {"steps": 1, "same": True}
    for found in (first, second):
        assert found["full"]["error"].startswith("SaveError: rank 1 (on ")
        assert "No space left on device" in found["full"]["error"]
    assert_only_the_first_is_kept(tmp_path / "kept")
    assert first["fingerprint"] == second["fingerprint"] == whole("two_steps")["two_steps"]
    assert second["optimizer"] == {"error": "ValueError: no", "steps": 2, "same": True}
    message = first["optimizer"].pop("error")
    assert re.fullmatch(r"PeerError: rank 1 \(on .*\) failed: ValueError: no", message)
    for found in (first, second):
        for call in ("step", "save", "state_dict"):
            assert "the training state is between two steps" in found[call]["error"], call


@pytest.mark.parametrize("how", ["save", pytest.param("spread", marks=pytest.mark.slow)])
def test_no_process_waits_for_an_owner_that_is_killed(how, tmp_path):
    ended = apart("owners_fail.py", tmp_path, how)
    assert ended[1][0] == -signal.SIGKILL
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["killed"]["error"].startswith("PeerError: rank 1 has left")
    half = "the training state is between two steps" in found["step"]["error"]
    assert half == (how == "spread")
    assert_only_the_first_is_kept(tmp_path / "kept")


def assert_only_the_first_is_kept(folder):
    assert [one.name for one in folder.iterdir()] == ["step-00000001"]
    assert read_checkpoint(folder)["steps_done"] == 1
