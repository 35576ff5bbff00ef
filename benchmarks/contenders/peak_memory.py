"""The peak memory of one short training, and the sizes that its bound is made of."""

from __future__ import annotations

import contextlib
import json
import sys

import torch
from torch import nn
from torch.nn import functional as F

import evenstep
from evenstep.bench import machine
from evenstep.training import trainer as trainer_module

EXAMPLES = 64
WIDTH = 2048
STEPS = 4
NETWORKS = ("resnet18", "mlp")

Batch = tuple[torch.Tensor, torch.Tensor]


def main() -> None:
    """Train on `devices` devices and print the peak; or, for 0 devices, print the sizes."""
    job = json.loads(sys.argv[1])
    model, batch = make(job["network"])
    if job["devices"] == 0:
        line = sizes(model, batch, job["shards"])
    else:
        if job["malloc"] == "gives_back":
            trainer_module.kept_memory = contextlib.nullcontext  # it would override the variable
        line = {"before_bytes": machine.peak_memory_bytes()}
        train(model, batch, job["devices"], job["shards"])
        line["peak_bytes"] = machine.peak_memory_bytes()
    print(json.dumps(line))


def make(network: str) -> tuple[nn.Module, Batch]:
    """Return the network and one batch: ResNet-18 on images, or four wide linear layers."""
    torch.manual_seed(0)
    labels = torch.randint(10, (EXAMPLES,))
    if network == "resnet18":
        return evenstep.models.resnet18(), (torch.randn(EXAMPLES, 1, 28, 28), labels)
    model = evenstep.models.mlp(WIDTH, hidden=(WIDTH,) * 3, num_classes=WIDTH)
    return model, (torch.randn(EXAMPLES, WIDTH), labels)


def train(model: nn.Module, batch: Batch, devices: int, shards: int) -> None:
    """Take a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    names = [f"cpu:{number}" for number in range(devices)]
    with evenstep.Trainer(
        model, optimizer, loss=nn.CrossEntropyLoss(), devices=names, shards=shards
    ) as trainer:
        for _ in range(STEPS):
            trainer.step(*batch)


def sizes(model: nn.Module, batch: Batch, shards: int) -> dict[str, int]:
    """Return the bytes of the gradients and of one shard's activations."""
    shard = tuple(tensor[: -(-EXAMPLES // shards)].clone() for tensor in batch)
    return {
        "gradients_bytes": sum(
            parameter.numel() * parameter.element_size() for parameter in model.parameters()
        ),
        "activations_bytes": saved_bytes(model, (shard[0], shard[1])),
    }


def saved_bytes(model: nn.Module, shard: Batch) -> int:
    """Return the bytes that the forward pass keeps for the backward pass.

    Every storage counts once, and the parameters' not at all (they are the model's, whatever the
    shards). The layout is the one that the trainer chooses.
    """
    if any(isinstance(child, nn.Conv2d) for child in model.modules()):
        model.to(memory_format=torch.channels_last)
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # holds them, so that no address is used twice

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        F.cross_entropy(model(shard[0]), shard[1], reduction="sum")
    return sum(storage.nbytes() for storage in kept.values())


if __name__ == "__main__":
    main()
