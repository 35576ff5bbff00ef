"""`partition="optimizer"` over processes: one result, whoever owns what."""

import json

import pytest

from evenstep.checkpoint.files import latest_checkpoint, read_checkpoint
from evenstep.errors import CheckpointError
from launched import alone, torchrun

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
    finished = torchrun(processes, "owned.py", tmp_path, "partition", *CASES, timeout_s=200)
    for rank in range(processes):
        found = results_of(finished, tmp_path, rank)
        for case in CASES:
            assert found[case] == whole[case], case


def run(processes, mode, out, case):
    """Return what one case gives in some processes, the same in all of them."""
    out.mkdir()
    job = ("owned.py", out, mode, case)
    finished = alone(*job) if processes == 1 else torchrun(processes, *job)
    found = [results_of(finished, out, rank)[case] for rank in range(processes)]
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "partition"), (1, "whole")),
        ((1, "whole"), (2, "partition")),
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
