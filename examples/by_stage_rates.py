"""A learning rate for each stage of ResNet-18: small near the input, larger towards the output.

    python examples/by_stage_rates.py cpu:0,cpu:1

The rates are parameter groups of a torch optimizer. evenstep uses the optimizer as it is, and the
result is the same on any number of devices.
"""

import sys

import torch

import evenstep
from evenstep.data import Loader, digits

LAST_RATE, DECAY, STEPS = 0.1, 0.7, 6

devices = sys.argv[1].split(",") if len(sys.argv) > 1 else "auto"
torch.manual_seed(0)
net = evenstep.models.resnet18()
stages = [stage for stage in net if any(True for _ in stage.parameters())]
groups = [
    {"params": stage.parameters(), "lr": LAST_RATE * DECAY ** (len(stages) - 1 - number)}
    for number, stage in enumerate(stages)
]
optimizer = torch.optim.SGD(groups)
print("rates", *(f"{group['lr']:.3f}" for group in optimizer.param_groups))
batches = Loader(digits(), 64)
with evenstep.Trainer(net, optimizer, torch.nn.CrossEntropyLoss(), devices=devices) as trainer:
    for X, y in trainer.epoch(batches):
        loss = trainer.step(X, y)
        if trainer.steps_done == STEPS:
            break
    print(f"loss {loss:.4f}, fingerprint {trainer.fingerprint()[:16]}")
