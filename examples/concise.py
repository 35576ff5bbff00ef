"""Trains ResNet-18 on all devices, concisely; the result is the same on any number of them.

    python examples/concise.py cpu:0,cpu:1

After "Concise Implementation for Multiple GPUs" of Dive into Deep Learning, on real digits of 7x7
pixels. The new weights do not tolerate the learning rate at once: it grows for half an epoch.
"""

import sys

import torch

import evenstep
from evenstep.data import Loader, digits

devices = sys.argv[1].split(",") if len(sys.argv) > 1 else "auto"
epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 4
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.AvgPool2d(4), *evenstep.models.resnet18())
optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
train, test = Loader(digits(), 64), Loader(digits(train=False), 256, shuffle=False)
steps = {"warmup_steps": 12, "total_steps": epochs * len(train)}
scheduler = evenstep.scale_lr(optimizer, base_batch_size=16, batch_size=64, **steps)
with evenstep.Trainer(net, optimizer, torch.nn.CrossEntropyLoss(), devices=devices) as trainer:
    for epoch in range(epochs):
        for X, y in trainer.epoch(train):
            loss = trainer.step(X, y)
            scheduler.step()
        measured = trainer.evaluate(test, {"accuracy": evenstep.metrics.accuracy})
        print(f"epoch {epoch + 1}, loss {loss:.3f}, test accuracy {measured['accuracy']:.3f}")
    print(f"fingerprint {trainer.fingerprint()[:16]} on {', '.join(map(str, trainer.devices))}")
