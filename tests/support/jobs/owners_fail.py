"""Trains with the optimizer split by owners, of whom the second one fails, or is killed.

    torchrun --nproc-per-node 2 tests/support/jobs/owners_fail.py OUT HOW

OUT is a folder for each rank's results and for checkpoints. HOW is "errors": the second process
fails in `before_update`, cannot write its part of a checkpoint, and fails in its optimizer. Or it
is killed: while it saves, "save", or before it sends its new parameters, "spread".
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
from evenstep.distributed.owners.reduce import ReducerToOwners
from evenstep.errors import EvenstepError
from zoo import build, make_batches

BATCHES = make_batches((33, 16, 24))
IS_SECOND = os.environ["RANK"] == "1"


def main():
    out, how = Path(sys.argv[1]), sys.argv[2]
    failing, found = set(), {}

    def fail(where):
        if IS_SECOND and where in failing:
            raise ValueError("no")

    class Adam(torch.optim.Adam):
        def step(self, closure=None):
            fail("optimizer")
            super().step()

    model = build("convolution")
    optimizer = Adam(model.parameters())

    def weights():
        return fingerprint(model, torch.optim.SGD(model.parameters()))

    def write(*given):
        raise OSError(28, "No space left on device")

    def killed(*given):
        os.kill(os.getpid(), signal.SIGKILL)

    def attempt(name, call, *given):
        before = weights()
        try:
            call(*given)
        except EvenstepError as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        except ValueError as error:
            found[name] = {"error": f"ValueError: {error}"}
        found[name] |= {"steps": trainer.steps_done, "same": before == weights()}

    def errors():
        failing.add("before_update")
        attempt("before_update", trainer.step, *BATCHES[1])
        failing.clear()
        real, owner_files.write_owner_file = owner_files.write_owner_file, write
        attempt("full", trainer.save, out / "kept")
        owner_files.write_owner_file = real
        trainer.step(*BATCHES[1])  # nothing of it has stayed
        found["fingerprint"] = trainer.fingerprint()
        failing.add("optimizer")
        attempt("optimizer", trainer.step, *BATCHES[2])
        failing.clear()
        attempt("step", trainer.step, *BATCHES[2])
        attempt("save", trainer.save, out / "kept")
        attempt("state_dict", optimizer.state_dict)

    def kill():
        if IS_SECOND:
            if how == "save":
                owner_files.write_owner_file = killed
            else:
                ReducerToOwners.spread = killed
        attempt("killed", trainer.save if how == "save" else trainer.step,
                *([out / "kept"] if how == "save" else BATCHES[1]))  # fmt: skip
        attempt("step", trainer.step, *BATCHES[1])

    trainer = evenstep.Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        devices=1,
        before_update=lambda module: fail("before_update"),
        layout=evenstep.Layout(divide=evenstep.Owners()),
        faults=evenstep.Faults(peer_timeout_s=20),
    )
    trainer.open()
    trainer.step(*BATCHES[0])
    trainer.save(out / "kept")
    errors() if how == "errors" else kill()
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    os._exit(0)  # a trainer that is closed now would wait for the other process


if __name__ == "__main__":
    main()
