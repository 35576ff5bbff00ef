"""A script whose processes differ in what the second argument says: what they have trained.

    python tests/support/jobs/apart.py OUT [KIND ...]

Writes to OUT for each KIND how it ended: the error, the steps done, the fingerprint, and the notes.
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
from evenstep.errors import EvenstepError
from evenstep.metrics import accuracy
from grouping import grouped
from zoo import CLASSES, build, make_batches

RANK = int(os.environ.get("RANK", "0"))
BATCHES = [  # of numbers that no processor rounds in another way
    ((X * 64).round() / 64, y) for X, y in make_batches([16] * 4)
]


class SGD(torch.optim.SGD):
    """An optimizer that is another one in rank 1, though its settings are equal."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad *= 1 + RANK
        return super().step(closure)


def optimizer_of(kind, model):
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    if kind in settings and RANK == 1:
        settings[kind] *= 2
    if kind == "another optimizer" and RANK == 1:
        return torch.optim.Adam(model.parameters())
    kind_of = SGD if "hidden" in kind else torch.optim.SGD
    return kind_of(model.parameters(), **settings)


def train(kind, trainer):
    """Train; after step 2, one process does what `kind` says."""
    for number, batch in enumerate(BATCHES):
        trainer.step(*batch)
        if kind == "killed":
            trainer.waitall()
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 2 and RANK == 1 and "late" in kind:
            trainer.optimizer.param_groups[0]["lr"] *= 0.5
    if kind.endswith(" save"):
        trainer.save(Path(sys.argv[1]) / "saved")
    if kind.endswith("save in background"):
        trainer.save(Path(sys.argv[1]) / "saved", background=True)
    if kind.endswith("evaluate"):
        trainer.evaluate(BATCHES, {"accuracy": accuracy})
    if kind.endswith("predict"):
        trainer.predict([X for X, _ in BATCHES])
    return "passed"


def ended(kind):
    """Train as `kind` says; return how that ended."""
    if kind == "denormal":
        torch.set_flush_denormal(RANK == 1)
    if kind == "precision":
        torch.set_float32_matmul_precision("medium" if RANK == 1 else "highest")
    if kind == "newer precision":
        torch.backends.mkldnn.fp32_precision = "bf16" if RANK == 1 else "none"
    if kind == "dtype":
        torch.set_default_dtype(torch.float64 if RANK == 1 else torch.float32)
    threads = 1 + RANK if kind == "threads" else 1
    options = {"allow_rounding": True} if kind.startswith("allowed") else {}
    model = build("dropout" if kind == "layers" else "convolution")
    if kind == "layers":
        next(layer for layer in model if isinstance(layer, nn.Dropout)).p = 0.1 * (1 + RANK)
    smoothing = 0.1 * RANK if kind == "loss" else 0.0
    weight = torch.full((CLASSES,), 1.0 + RANK) if kind == "class weights" else None
    error, reached = None, "nothing"
    trainer = evenstep.Trainer(
        model,
        optimizer_of(kind, model),
        nn.CrossEntropyLoss(weight, label_smoothing=smoothing),
        **grouped(
            devices=[evenstep.Device("cpu", 0, threads=threads)],
            peer_timeout_s=20.0,
            max_in_flight=2 if "in flight" in kind else 1,
            **options,
        ),
    )
    try:
        with trainer:
            reached = train(kind, trainer)
    except EvenstepError as caught:
        error = f"{type(caught).__name__}: {caught}"
    finally:
        torch.set_flush_denormal(False)
        torch.set_default_dtype(torch.float32)
        torch.backends.mkldnn.fp32_precision = "none"
        torch.backends.mkldnn.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
    return {
        "error": error,
        "reached": reached,
        "steps": trainer.steps_done,
        "fingerprint": trainer.fingerprint(),
        "within_rounding": trainer.within_rounding,
        "notes": trainer.notes,
    }


def main():
    """Write how each kind has ended in this rank."""
    found = {kind: ended(kind) for kind in sys.argv[2:]}
    (Path(sys.argv[1]) / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
