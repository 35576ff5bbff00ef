"""A plain training loop that is recorded, for one process or several, with a fault on request.

    python tests/support/jobs/recorded.py OUT FAULT...

FAULT are names of `FAULTS`. Each process records to the folder OUT. Nothing of evenstep is used but
`evenstep.record`.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import evenstep

FAULTS = {
    "other weights", "other order", "no sampler", "whole batches", "no epoch", "shuffled", "odd",
    "drop last", "other data", "evaluation", "bfloat16", "batch norm", "dropout", "temperature",
    "uneven parts", "masked", "frozen", "alone", "accumulated", "halved", "summed", "clipped",
    "clipped alone", "by hand", "rate", "momentum", "clamped", "scaled update", "layer norm",
    "unused", "step level", "clamped weights", "float16", "scaler", "overflow", "two optimizers",
    "other turns", "longer", "adam", "nan", "counted", "operators", "values", "less dropout",
    "targets given", "compiled", "smoothed", "twice", "rounded", "late alone", "late clipped",
    "late halved", "late signs", "late rate", "late reset", "late temperature", "late draw",
    "late smoothed", "late limit", "late twice", "late bfloat16", "task", "by name", "text",
    "some masked", "times world", "double", "swapped weights", "late divided", "time first",
}  # fmt: skip
EXAMPLES, BATCH, EPOCHS = 96, 32, 2
LATE = 3
"""The update from which on faults that are called late are there."""


class Net(nn.Module):
    def __init__(self, faults):
        super().__init__()
        self.temperature = 2.0 if "temperature" in faults else 1.0
        norm = nn.Identity()
        if "batch norm" in faults:
            norm = nn.BatchNorm2d(4)
        elif "layer norm" in faults:
            norm = nn.GroupNorm(2, 4)
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten())
        rate = 0.5 if "dropout" in faults else 0.0
        self.drop = nn.Dropout(0.25 if "less dropout" in faults else rate)
        self.scale = Scale(self.temperature)
        self.head = nn.Linear(4 * 16, 3)
        self.extra = nn.Linear(4 * 16, 3)
        self.is_unused = "unused" in faults

    def forward(self, x, targets=None):
        x = self.scale(self.drop(self.body(x)))
        return self.head(x) if self.is_unused else self.head(x) + self.extra(x)


class TextNet(nn.Module):
    """Takes texts of any length, filled up with zeros."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 4, padding_idx=0)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.words(x).sum(1))


class TimeFirstNet(nn.Module):
    """Takes texts whose second dimension counts them, as recurrent layers do by default."""

    def __init__(self):
        super().__init__()
        self.words, self.layer = nn.Embedding(20, 4), nn.GRU(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.layer(self.words(x))[0][-1])


class Task(nn.Module):
    """Holds a model, as Lightning's modules do: what is called is a method, or this as a whole."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.loss = nn.CrossEntropyLoss()

    def predict(self, x):
        return self.model(x)

    forward = predict


class Scale(nn.Module):
    def __init__(self, temperature):
        super().__init__()
        self.temperature = temperature

    def forward(self, x):
        return x / self.temperature


def parts_of(x, y, rank, world, faults):
    """Return the parts of a batch that this process computes, one after another."""
    if "uneven parts" in faults:  # of the whole batch, by hand
        cut = len(x) // 4
        halves = [(x[:cut], y[:cut]), (x[cut:], y[cut:])]
        return halves if world == 1 else [halves[rank]]
    count = 2 if {"accumulated", "halved"} & faults else 1
    if "text" in faults:
        return [
            (cut_to_the_longest(x), y) for x, y in zip(x.chunk(count), y.chunk(count), strict=True)
        ]
    return [*zip(x.chunk(count), y.chunk(count), strict=True)]


def cut_to_the_longest(x):
    return x[:, : int((x > 0).sum(1).max())]


def loader_of(rank, world, faults):
    torch.manual_seed(7 if "other data" in faults else 5)
    X, Y = torch.randn(EXAMPLES, 1, 6, 6), torch.randint(3, (EXAMPLES,))
    if "masked" in faults:
        Y[::4] = -100  # all of them in one of two processes
    if "some masked" in faults:
        Y[torch.rand(EXAMPLES) < 0.4] = -100
    if "text" in faults:
        lengths = 5 + torch.arange(EXAMPLES) % BATCH // 8
        X = torch.randint(1, 20, (EXAMPLES, 8)) * (torch.arange(8) < lengths[:, None])
    if "time first" in faults:
        X = torch.randint(20, (EXAMPLES, 8))
    if "double" in faults:
        X = X.double()
    if "odd" in faults:
        X, Y = X[:-7], Y[:-7]
    if "nan" in faults:
        X[70] = float("nan")
    data, size, sampler = TensorDataset(X, Y), BATCH, None
    if world > 1 and not {"no sampler", "uneven parts"} & faults:
        sampler = DistributedSampler(data, shuffle="shuffled" in faults)
        size = BATCH if "whole batches" in faults else BATCH // world
    order = torch.Generator().manual_seed(9 if "other order" in faults else 8)
    shuffle = "other order" in faults or ("shuffled" in faults and world == 1)
    return DataLoader(
        data,
        size,
        sampler=sampler,
        shuffle=shuffle if sampler is None else None,
        generator=order,
        drop_last="drop last" in faults,
    )


def average(model, world, faults):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            if "summed" not in faults:
                parameter.grad /= world


def main():
    out, *given = sys.argv[1:]
    faults = {*given}
    assert faults <= FAULTS, faults - FAULTS
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo")
    loader = loader_of(rank, world, faults)
    torch.manual_seed(2 if "other weights" in faults else 1)
    model = model_of(faults)
    if "double" in faults:
        model.double()
    if "swapped weights" in faults:
        model.head.weight.data = model.head.weight.data.roll(1, 1)
    if "frozen" in faults:
        model.extra.requires_grad_(False)
    if "clamped" in faults:
        model.head.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    task = Task(model)
    by_hand = {"by hand", "summed", "clipped alone"} & faults
    net = task.predict if "task" in faults else model
    if world > 1 and not by_hand and "alone" not in faults:
        net = nn.parallel.DistributedDataParallel(
            task if "task" in faults else model, find_unused_parameters=True
        )
    if "compiled" in faults:
        net = torch.compile(net, backend="aot_eager")
    optimizers = optimizers_of(model, faults)
    level = "step" if "step level" in faults else "module"
    level = "operator" if "operators" in faults else level
    values = ["head*"] if "values" in faults else ()
    batch_dim = 1 if "time first" in faults else 0
    with evenstep.record(out, level=level, values=values, batch_dim=batch_dim):
        train(net, model, optimizers, loader, rank, world, faults, by_hand)
    if world > 1:
        dist.barrier()  # a group that ends right after its last sum may hang (pytorch#56297)
        dist.destroy_process_group()


def model_of(faults):
    if "time first" in faults:
        return TimeFirstNet()
    return TextNet() if "text" in faults else Net(faults)


def optimizers_of(model, faults):
    if "adam" in faults:
        return [torch.optim.Adam(model.parameters(), lr=0.1)]
    options = {
        "lr": 0.2 if "rate" in faults else 0.1,
        "momentum": 0.5 if "momentum" in faults else 0.9,
    }
    if "two optimizers" not in faults:
        return [torch.optim.SGD(model.parameters(), **options)]
    first = [*model.body.parameters()]
    rest = [*model.head.parameters(), *model.extra.parameters()]
    return [torch.optim.SGD(part, **options) for part in (first, rest)]


def output_of(net, x, targets, faults):
    if "time first" in faults:
        return net(x.T)
    if "by name" in faults:
        return net(targets=targets, x=x)
    return net(x, targets) if "targets given" in faults else net(x)


def loss_of(output, targets, world, faults):
    if "counted" not in faults:
        smoothing = 0.1 if "smoothed" in faults else 0.0
        loss = F.cross_entropy(output, targets, label_smoothing=smoothing)
        loss = loss / 2 if "divided" in faults else loss
        return loss * world if "times world" in faults else loss
    counted = (targets != -100).sum()
    if world > 1:
        dist.all_reduce(counted)
    return F.cross_entropy(output, targets, reduction="sum") * world / counted


@torch.no_grad()
def begin_late(model, optimizers, faults):
    """Change a training between two of its updates."""
    if "late halved" in faults:
        model.body[0].weight.mul_(0.5)
    if "late rate" in faults:
        optimizers[0].param_groups[0]["lr"] = 0.2
    if "late reset" in faults:
        optimizers[0].state.clear()
    if "late temperature" in faults:
        model.scale.temperature = 2.0
    if "late draw" in faults:
        torch.rand(1)


@torch.no_grad()
def change_gradients(model, faults):
    """Change gradients between the backward pass and the update."""
    if "rounded" in faults:
        for parameter in model.parameters():
            parameter.grad *= 1 + 2.0**-23
    if "clipped" in faults:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05 if "limit" in faults else 0.1)
    if "signs" in faults:
        for parameter in model.parameters():
            parameter.grad.sign_()


def train(net, model, optimizers, loader, rank, world, faults, by_hand):
    if "evaluation" in faults:
        net.eval()
    dtype = torch.float16 if "float16" in faults else torch.bfloat16
    scale = 2.0**24 if "overflow" in faults else 2.0**10
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled="scaler" in faults)
    updates = 0
    for epoch in range(EPOCHS + ("longer" in faults)):
        if world > 1 and "no epoch" not in faults and hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            if updates == LATE:
                faults = faults | {one.removeprefix("late ") for one in faults}
                begin_late(model, optimizers, faults)
            updates += 1
            for optimizer in optimizers:
                optimizer.zero_grad()
            parts = parts_of(x, y, rank, world, faults)
            for part, targets in parts:
                with torch.autocast("cpu", dtype, enabled=bool({"bfloat16", "float16"} & faults)):
                    output = output_of(net, part, targets, faults)
                loss = loss_of(output.float(), targets, world, faults)
                if "twice" in faults:
                    loss = loss + net(part).square().mean()
                if "accumulated" not in faults:
                    loss = loss / len(parts)
                scaler.scale(loss).backward()
            if "clipped alone" in faults:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if by_hand and world > 1 and "alone" not in faults:
                average(model, world, faults)
            change_gradients(model, faults)
            for optimizer in optimizers[:: -1 if "other turns" in faults and epoch else 1]:
                scaler.step(optimizer)
            scaler.update()
            if "clamped weights" in faults:
                with torch.no_grad():
                    model.head.weight.clamp_(-0.05, 0.05)


if __name__ == "__main__":
    main()
