"""ResNet-18 in training that is saved every few steps: how long each step and each save takes.

`"save"` is "never", "waiting" (training stands still until the disk has the checkpoint) or "aside".
"""

from __future__ import annotations

import json
import sys
import tempfile
import time

import torch
from torch import nn

import evenstep
from evenstep.models import resnet18

LEARNING_RATE, MOMENTUM = 0.1, 0.9


def main() -> None:
    """Time steps and saves, and print the line."""
    job = json.loads(sys.argv[1])
    torch.manual_seed(0)
    model = resnet18(10)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    images = torch.randn(job["batch"], 1, 28, 28)
    labels = torch.arange(job["batch"]) % 10
    saves_ms = []
    with (
        tempfile.TemporaryDirectory() as folder,
        evenstep.Trainer(
            model, optimizer, nn.CrossEntropyLoss(), devices=["cpu:0", "cpu:1"]
        ) as trainer,
    ):
        for _ in range(job["warmup_steps"]):
            trainer.step(images, labels)
        began = time.perf_counter()
        for step in range(job["steps"]):
            trainer.step(images, labels)
            if job["save"] != "never" and step % job["every"] == 0:
                saving = time.perf_counter()
                trainer.save(folder, aside=job["save"] == "aside")
                saves_ms.append(1e3 * (time.perf_counter() - saving))
        trainer.wait_for_save()
        seconds = time.perf_counter() - began
    print(json.dumps({"step_ms": 1e3 * seconds / job["steps"], "saves_ms": saves_ms}))


if __name__ == "__main__":
    main()
