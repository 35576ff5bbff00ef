"""Ctrl-C, or an exception from outside, in one of two processes: each of them ends at a step."""

import json

import pytest
import torch

from interrupting import TRACED, undisturbed_course
from launched import launched
from marks import slow

STEPS = 4


SOME, MANY = [4001, 7001, 10007], [*range(503, 20000, 811)]
CASES = [("press", 0, SOME), ("throw", 1, SOME)]
CASES += [slow(act, victim, MANY) for act in ("press", "throw") for victim in (0, 1)]


@TRACED
@pytest.mark.parametrize(("act", "victim", "places"), CASES)
def test_both_end_at_a_step_and_go_on_from_there(tmp_path, act, victim, places):
    torch.save(undisturbed_course(STEPS)[0], tmp_path / "undisturbed.pt")
    finished = launched(2, "interrupted.py", tmp_path, victim, act, *places)
    assert finished.returncode == 0, finished.stderr
    own, others = (
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (victim, 1 - victim)
    )
    assert len(own) == len(places)
    raised = {"press": "KeyboardInterrupt", "throw": "OutsideError"}[act]
    assert {ended for ended, _ in own} <= {raised, "done"}
    assert raised in {ended for ended, _ in own}
    assert {ended for ended, _ in others} <= {"PeerError", "done"}
    assert all(abs(mine - its) <= 1 for (_, mine), (_, its) in zip(own, others, strict=True))
