"""Trains ResNet-18 on all devices, concisely; the result is the same on any number of them.

    python examples/concise.py cpu:0,cpu:1

After "Concise Implementation for Multiple GPUs" of Dive into Deep Learning, on real digits.
"""

import sys

import torch

import evenstep
from evenstep.data import Loader, digits

devices = sys.argv[1].split(",") if len(sys.argv) > 1 else "auto"
torch.manual_seed(0)
net = evenstep.models.resnet18()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
train, test = Loader(digits(), 256), Loader(digits(train=False), 256, shuffle=False)
with evenstep.Trainer(net, optimizer, torch.nn.CrossEntropyLoss(), devices=devices) as trainer:
    for epoch in range(int(sys.argv[2]) if len(sys.argv) > 2 else 4):
        for X, y in trainer.epoch(train):
            loss = trainer.step(X, y)
        measured = trainer.evaluate(test, {"accuracy": evenstep.metrics.accuracy})
        print(f"epoch {epoch + 1}, loss {loss:.3f}, test accuracy {measured['accuracy']:.3f}")
    print(f"fingerprint {trainer.fingerprint()[:16]} on {', '.join(map(str, trainer.devices))}")
