"""Interrupts one of two processes; both end at a step, and go on from what the first one saves.

torchrun --nproc-per-node 2 tests/support/jobs/interrupted.py OUT VICTIM ACT PLACE...
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed import TCPStore

sys.path.insert(0, str(Path(__file__).parents[1]))

import evenstep
from evenstep.errors import PeerError
from grouping import grouped
from interrupting import OutsideError, Training, interrupting, lanes_left, press_ctrl_c
from reference import assert_same_bits
from trainers import state_of

STEPS = 4
QUICK = {"check": "off", "tune_malloc": False, "peer_timeout_s": 30.0}
ACTS = {"press": press_ctrl_c, "throw": "throw"}


def interrupted(training, act, place):
    """Train, interrupted at a place if there is one; return what ended it."""
    disturbed = contextlib.nullcontext() if place is None else interrupting(ACTS[act], place)
    try:
        with training.trainer, disturbed:
            training.run(STEPS)
    except (KeyboardInterrupt, OutsideError, PeerError) as error:
        return type(error).__name__
    return "done"


def go_on(folder):
    """Train from a checkpoint to the end; return the state."""
    training = Training(**QUICK)
    given = training.trainer.model, training.optimizer, nn.CrossEntropyLoss()
    training.trainer = evenstep.Trainer.load(folder, *given, **grouped(**QUICK))
    with training.trainer:
        training.run(STEPS)
        return state_of(training.trainer)


def main():
    """Try each place; write what has ended the process, and after how many steps."""
    out, victim, act, *places = sys.argv[1:]
    rank, out = int(os.environ["RANK"]), Path(out)
    undisturbed = torch.load(out / "undisturbed.pt")
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    seen = []
    for place in map(int, places):
        training, folder = Training(**QUICK), out / str(place)
        ended = interrupted(training, act, place if rank == int(victim) else None)
        training.assert_is_at_a_step_of(undisturbed)
        assert not lanes_left()
        seen.append((ended, training.trainer.steps_done))
        if rank == 0:
            training.trainer.save(folder)
            store.set(f"saved/{place}", "")
        store.wait([f"saved/{place}"])
        assert_same_bits(go_on(folder), undisturbed[STEPS])
    (out / f"{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
