"""Trains with the optimizer split by owners, of whom one fails or is killed.

    torchrun --nproc-per-node 2 tests/support/jobs/owners_fail.py OUT HOW

OUT is a folder for each rank's results and for checkpoints. HOW is where the second process goes
wrong: in `before_update`, or killed while it saves: `killed`, or unable to write there: `full`.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import evenstep
from evenstep.checkpoint import owner_files
from evenstep.checkpoint.fingerprint import fingerprint
from zoo import build, make_batches

BATCHES = make_batches((33, 16, 24))


def main():
    out, how = Path(sys.argv[1]), sys.argv[2]
    is_second = os.environ["RANK"] == "1"
    model = build("convolution")
    optimizer = torch.optim.Adam(model.parameters())
    found = {}

    def before_update(module):
        if (
            is_second and how == "before_update" and trainer.steps_done == 2
        ):  # the second is under way
            raise ValueError("no")

    def write(*given):
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(28, "No space left on device")

    trainer = evenstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), devices=1, partition="optimizer",
        before_update=before_update, peer_timeout_s=20,
    )  # fmt: skip
    try:
        with trainer:
            trainer.step(*BATCHES[0])
            trainer.save(out / "kept")
            before = fingerprint(model, torch.optim.SGD(model.parameters()))
            if how != "before_update" and is_second:
                owner_files.write_owner_file = write
            try:
                trainer.step(*BATCHES[1])
                trainer.save(out / "kept")
            except Exception as error:
                found["error"] = f"{type(error).__name__}: {error}"
                after = fingerprint(model, torch.optim.SGD(model.parameters()))
                found |= {"steps": trainer.steps_done, "same": before == after}
                raise
    except Exception:
        pass
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
