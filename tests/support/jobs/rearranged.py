"""A script that trains up to some step in one arrangement, from where the one before was killed.

    torchrun --nproc-per-node 2 tests/support/jobs/rearranged.py OUT 6 4 '{"devices": 2}'

OUT is a folder for checkpoints and for the fingerprint of each rank; then the step to train up to,
the step in which the process kills itself (0: none), and the options of the trainer.
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
from zoo import build, make_batches

BATCHES = make_batches((33, 16, 30, 24, 17, 40, 33, 8))


def main():
    """Train, and write the fingerprint."""
    out, last, dies_at, options = Path(sys.argv[1]), *map(json.loads, sys.argv[2:5])
    model = build("dropout")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    given = model, optimizer, nn.CrossEntropyLoss()
    stages = [evenstep.Stages(options.pop("stages"))] if "stages" in options else []
    owners = [evenstep.Owners()] if options.pop("owners", False) else []
    options["layout"] = evenstep.Layout(divide=(*stages, *owners))
    folder = out / "checkpoints"
    is_new = not folder.exists()
    made = (
        evenstep.Trainer(*given, **options)
        if is_new
        else evenstep.Trainer.load(folder, *given, **options)
    )
    with made as trainer:
        while trainer.steps_done < last:
            X, y = BATCHES[trainer.steps_done]
            if trainer.steps_done + 1 == dies_at:
                model[4].register_forward_hook(die)
            trainer.step(X, y)
            trainer.waitall()
            trainer.save(folder)
        found = trainer.fingerprint()
    (out / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


def die(module, inputs, output):
    """End the process at once."""
    if module.training:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
