"""The errors of the other processes when one of several fails, is late, or differs."""

import os
import re

import pytest
from torch import nn

from evenstep.distributed import local_share
from evenstep.errors import InputError
from launched import JOBS, apart, free_port, launched, started, wait_for_all
from marks import slow
from trainers import open_trainer
from warm import run as run_job

LIMIT_S = 3.0


def reported(tmp_path, kind, rank):
    seconds, text = (tmp_path / f"{rank}.txt").read_text().split("\n", 1)
    return float(seconds), text


def run(tmp_path, kind, *more):
    return launched(2, "fail.py", tmp_path, kind, *more)


@pytest.mark.parametrize(
    ("kind", "own", "of_others"),
    [
        (
            "raise",
            "RuntimeError: rank 1 has a problem of its own",
            r"rank 1 .*failed: RuntimeError",
        ),
        slow("bad batch", "BatchError: got a batch of 0 examples", r"rank 1 .*failed: BatchError"),
        slow(
            "other batch",
            "PeerError: rank 1 is at step 3",
            r"rank 0 is at step 3 .*32 examples.*20",
        ),
    ],
)
def test_an_error_of_one_process_reaches_the_others(tmp_path, kind, own, of_others):
    run(tmp_path, kind)
    assert reported(tmp_path, kind, 1)[1].startswith(own)
    assert re.search(of_others, reported(tmp_path, kind, 0)[1])


def test_a_process_whose_optimizer_has_failed_takes_no_further_step(tmp_path):
    run(tmp_path, "optimizer")
    half = "ClosedError: step 3 failed .* between two steps: load the last checkpoint"
    assert re.match(half, reported(tmp_path, "optimizer", 1)[1])
    seconds, text = reported(tmp_path, "optimizer", 0)
    assert re.match(f"PeerError: rank 1 .*failed: {half}", text)
    assert seconds < LIMIT_S


@pytest.mark.slow
def test_an_uncaught_error_shows_its_traceback_once(tmp_path):
    (code, _, others), (own_code, _, own) = apart("fail.py", tmp_path, "raise", "uncaught")
    assert (code, own_code) == (1, 1)
    assert "Traceback" in own
    assert "raise RuntimeError" in own
    expected = r"evenstep: rank 1 \(on \S+\) failed: RuntimeError: rank 1 has a problem of its own"
    assert re.fullmatch(expected, others.strip())


def test_a_process_that_is_killed_is_named_without_lines_of_gloo(tmp_path):
    (code, _, errors), (killed, *_) = apart("fail.py", tmp_path, "die", "uncaught")
    assert (code, killed) == (1, -9)
    assert errors.count("Traceback") == 1
    assert "PeerError: rank 1 has left" in errors
    assert not re.search("gloo|direct cause", errors, re.IGNORECASE)


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), ("in buckets",)], ids=["", "in buckets"])
def test_an_error_while_gradients_are_in_flight_reaches_the_others(tmp_path, how):
    run(tmp_path, "raise in backward", *how)
    assert reported(tmp_path, "", 1)[1].startswith("RuntimeError: rank 1 has a problem of its own")
    seconds, text = reported(tmp_path, "", 0)
    assert re.match(r"PeerError: rank 1 .*failed: RuntimeError", text)
    assert seconds < LIMIT_S


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        (
            "other model",
            r"InputError: the processes disagree about what is trained: the fingerprint of model "
            r"and optimizer is \w+ on rank 1 .* but \w+ on rank 0 .*call torch.manual_seed\(0\)",
        ),
        slow(
            "flipped bit",
            r"DivergedError: rank 1 .* differs from the other processes after step 5: the first "
            r"tensor that differs is parameter/0\.weight",
        ),
        slow(
            "other data",
            r"InputError: the processes disagree about the data: a digest of some examples is",
        ),
    ],
)
def test_what_differs_between_processes_is_named_in_all(tmp_path, kind, pattern):
    run(tmp_path, kind)
    for rank in range(2):
        assert re.search(pattern, reported(tmp_path, kind, rank)[1])


@pytest.mark.parametrize(
    ("variables", "pattern"),
    [
        ({"RANK": "first"}, "the variable RANK is 'first'"),
        ({"WORLD_SIZE": "-2"}, "the variable WORLD_SIZE is '-2'"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR"),
    ],
)
def test_an_environment_that_is_set_by_halves_is_named(variables, pattern, monkeypatch):
    usual = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in {**usual, "TORCHELASTIC_RUN_ID": "test", **variables}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=pattern), open_trainer(nn.Linear(2, 2)):
        pass


@pytest.mark.parametrize(("address", "share"), [("localhost", (1, 2)), ("10.0.0.1", (0, 1))])
def test_processes_that_meet_at_the_loopback_share_the_devices(address, share, monkeypatch):
    """As those of `torch.multiprocessing.spawn` do, for which nothing sets LOCAL_RANK."""
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": "1", "RANK": "1", "WORLD_SIZE": "2"}
    for name, value in meeting.items():
        monkeypatch.setenv(name, value)
    assert local_share() == share


@pytest.mark.parametrize("launcher", [{"TORCHELASTIC_RUN_ID": "test"}, {}], ids=["torchrun", "env"])
def test_a_process_that_starts_alone_waits_no_longer_than_the_limit(launcher, tmp_path):
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "0"}
    variables |= {"WORLD_SIZE": "2", **launcher}
    ended = run_job(JOBS / "fail.py", tmp_path, "nothing", env={**os.environ, **variables})
    assert ended.returncode == 0, ended.stderr
    seconds, text = reported(tmp_path, "nothing", 0)
    assert seconds < 4 * LIMIT_S
    assert re.match(
        r"PeerError: (the processes did not meet|rank 1 did not respond) within 3 s", text
    )


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("stop", ()),
        slow("die", ()),
        slow("stop", ("in buckets",)),
        slow("die in backward", ("in buckets",)),
    ],
    ids=str,
)
def test_a_process_that_is_late_or_has_left_is_named_within_the_time_limit(tmp_path, kind, how):
    with started("fail.py", tmp_path, kind, *how) as (processes, store):
        wait_for_all(store)
        processes[0].wait(60)
        seconds, text = reported(tmp_path, kind, 0)
    assert seconds < 4 * LIMIT_S
    reason = r"did not respond within 3 s" if kind == "stop" else r"has left"
    assert re.search(
        rf"PeerError: rank 1 {reason}.*: rank 0 waited for its part of step 3; rank 1 is on \S+, "
        r"last seen \d s ago, \w+",
        text,
    )
