"""Has a signal handler of one process save, and then ask all to stop; writes what each has seen.

torchrun --nproc-per-node 2 tests/support/jobs/handlers.py OUT
"""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from evenstep.errors import InputError
from interrupting import Training, interrupted_at

out, rank = Path(sys.argv[1]), int(os.environ["RANK"])
training, refused = Training(check="off"), []
trainer = training.trainer


def on_signal(number, frame):
    try:
        trainer.save(out / "checkpoints")
    except InputError as error:
        refused.append(str(error))
    trainer.ask_to_stop()


signal.signal(signal.SIGTERM, on_signal)
place = (
    interrupted_at(2000, lambda: signal.raise_signal(signal.SIGTERM))
    if rank == 1
    else contextlib.nullcontext()
)
with trainer:
    with place:
        while not trainer.should_stop:
            for batch in trainer.epoch(training.loader):
                if trainer.should_stop:
                    break
                trainer.step(*batch)
    path = trainer.save(out / "checkpoints")
seen = {"refused": refused, "steps": trainer.steps_done, "path": path.name}
(out / f"{rank}.json").write_text(json.dumps(seen))
