"""The golden runs: short trainings whose results must never change.

Each run is one experiment (model, optimizer, options, data) and the layouts that must all give its
result. Results are exact: fingerprints, losses as hexadecimal floats, metrics, digests of outputs.
Only the public API is used, so that the runs outlive any restructuring of the package.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from click.testing import CliRunner
from torch import nn

import evenstep
import evenstep.cli
from evenstep.data import Loader, digits
from evenstep.engine import InlineLanes
from grouping import grouped
from layouts import TWO, mixed, own, shared
from zoo import CLASSES, SparseInPlaces, build, make_batches, options_of

HERE = Path(__file__).parent
SIZES = (32, 29, 5, 32)  # full, uneven, fewer examples than some V
NORMED_SIZES = (32, 29, 16)  # no shard of one example


class Table(nn.Module):
    """A table with sparse gradients and nothing else."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.EmbeddingBag(9, CLASSES, sparse=True)

    def forward(self, x):
        return self.table((x.flatten(1) * 2).long().clamp(-4, 4) + 4)


@dataclasses.dataclass(frozen=True)
class Run:
    """One experiment and its layouts.

    Attributes:
        train: called with a layout's options for `Trainer`; returns the result as plain JSON.
        layouts: by name, the options that must not change the result.
        slow: the layouts that belong to the slow tests.
    """

    train: Callable[..., dict]
    layouts: dict[str, dict]
    slow: tuple[str, ...] = ()


ONE_AND_TWO = {"1": {"devices": 1}, "2": {"devices": TWO}}
MANY = {**ONE_AND_TWO, "3": {"devices": shared(3)}, "2 own": {"devices": own(2)}}
MANY["2, one thread"] = {"devices": TWO, "lanes": InlineLanes}
MIXED = {**ONE_AND_TWO, "3 mixed": {"devices": mixed(3)}}
IN_FLIGHT = {
    **ONE_AND_TWO,
    "2, in flight 2": {"devices": TWO, "max_in_flight": 2},
    "3 mixed, in flight 3": {"devices": mixed(3), "max_in_flight": 3},
}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def result_of(trainer, losses=(), **more):
    """Return what is compared of a training, all of it exact."""
    return {
        "fingerprint": trainer.fingerprint(),
        "fingerprint 2": trainer.fingerprint(version=2),
        "losses": [float(loss).hex() for loss in losses],
        **{name: _exact(value) for name, value in more.items()},
    }


def _exact(value):
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, torch.Tensor):
        return hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    return value


def accuracy_and_outputs(trainer, batches):
    """Return a metric and the outputs, both over all `batches`."""
    accuracy = trainer.evaluate(batches, {"accuracy": evenstep.metrics.accuracy})["accuracy"]
    return {"accuracy": accuracy, "outputs": trainer.predict(batches)}


def train_zoo(name, optimizer=sgd, sizes=None, **options):
    """Train a small model on random data with cross entropy; evaluate and predict at the end."""
    model = build(name) if isinstance(name, str) else name()
    sizes = sizes or (NORMED_SIZES if name == "batch_norm" else SIZES)
    with evenstep.Trainer(
        model,
        optimizer(model.parameters()),
        nn.CrossEntropyLoss(),
        **grouped(seed=3, **options_of(model), **options),
    ) as trainer:
        losses = [trainer.step(*batch) for batch in make_batches(sizes)]
        trainer.waitall()
        return result_of(trainer, losses, **accuracy_and_outputs(trainer, make_batches((16, 23))))


def train_digits(make_model, *, steps, batch_size=64, optimizer=sgd, **options):
    """Train on the real digits, in the shuffled order of a loader."""
    torch.manual_seed(0)
    model = make_model()
    with evenstep.Trainer(
        model, optimizer(model.parameters()), nn.CrossEntropyLoss(), **grouped(seed=0, **options)
    ) as trainer:
        losses, loader = [], Loader(digits(), batch_size=batch_size, seed=5)
        while trainer.steps_done < steps:
            for batch in trainer.epoch(loader):
                losses.append(float(trainer.step(*batch)))
                if trainer.steps_done == steps:
                    break
        test = Loader(digits(train=False), batch_size=100, shuffle=False)
        return result_of(trainer, losses, **accuracy_and_outputs(trainer, test))


def train_objective(**options):
    """Train with an objective of its own count, on batches that are dicts."""

    def objective(model, batch):
        losses = nn.functional.cross_entropy(model(batch["X"]), batch["y"], reduction="none")
        return (losses * batch["mask"]).sum(), batch["mask"].sum()

    model = build("convolution")
    with evenstep.Trainer(
        model, adam(model.parameters()), **grouped(objective=objective, seed=3, **options)
    ) as trainer:
        losses = [
            trainer.step({"X": X, "y": y, "mask": (torch.arange(len(y)) % 3 > 0).float()})
            for X, y in make_batches(SIZES)
        ]
        return result_of(trainer, losses)


def train_clipped_and_scheduled(**options):
    """Train with a gradient hook and a scheduler."""
    model = build("attention")
    optimizer = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    clip = functools.partial(nn.utils.clip_grad_norm_, max_norm=0.05)
    with evenstep.Trainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(label_smoothing=0.1),
        **grouped(
            before_update=lambda module: clip(module.parameters()),
            scheduler=scheduler,
            seed=3,
            **options,
        ),
    ) as trainer:
        losses = []
        for batch in make_batches(SIZES):
            losses.append(trainer.step(*batch))
            scheduler.step()
        trainer.waitall()
        return result_of(trainer, losses)


def train_changing_model(**options):
    """Train while the user changes the model between steps."""
    model = build("dropout")
    with evenstep.Trainer(
        model,
        sgd(model.parameters()),
        nn.CrossEntropyLoss(),
        **grouped(seed=3, **options_of(model), **options),
    ) as trainer:
        losses = []
        for number, batch in enumerate(make_batches(SIZES)):
            trainer.waitall()
            model[2].p = 0.1 * (number + 1)
            model[1].weight.requires_grad_(number != 1)
            losses.append(float(trainer.step(*batch)))
        return result_of(trainer, losses)


def train_resumed(*, first, options, in_flight=1, optimizer=adam):
    """Stop after three steps in the middle of an epoch; resume on another layout."""

    def fresh():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.2),
            nn.LazyLinear(10),
        )  # fmt: skip
        model(torch.zeros(2, *digits().tensors[0].shape[1:]))
        return model, optimizer(model.parameters()), nn.CrossEntropyLoss()

    def train(trainer, until):
        with trainer:
            while trainer.steps_done < until:
                for batch in trainer.epoch(Loader(digits(), batch_size=300, seed=1)):
                    trainer.step(*batch)
                    if trainer.steps_done == until:
                        break
            return result_of(trainer)

    if first is None:
        return train(evenstep.Trainer(*fresh(), **grouped(seed=4, **options)), until=7)
    with tempfile.TemporaryDirectory() as folder:
        stopped = evenstep.Trainer(*fresh(), **grouped(seed=4, max_in_flight=in_flight, **first))
        train(stopped, until=3)
        stopped.save(folder)
        return train(evenstep.Trainer.load(folder, *fresh(), **grouped(**options)), until=7)


def load_old_checkpoint(**options):
    """Resume from the checkpoint that lies beside this file, made by version 0.1.0."""
    model = build("batch_norm", seed=9)
    trainer = evenstep.Trainer.load(
        HERE / "checkpoint",
        model,
        adam(model.parameters()),
        nn.CrossEntropyLoss(),
        **grouped(**options),
    )
    with trainer:
        opened = trainer.fingerprint()
        losses = [trainer.step(*batch) for batch in make_batches(NORMED_SIZES, seed=8)]
        return result_of(trainer, losses, opened=opened)


def save_old_checkpoint(folder):
    """Write the checkpoint for `load_old_checkpoint` (done once, at version 0.1.0)."""
    model = build("batch_norm")
    with evenstep.Trainer(
        model, adam(model.parameters()), nn.CrossEntropyLoss(), devices=TWO, shards=5, seed=7
    ) as trainer:
        for batch in make_batches((20, 13)):
            trainer.step(*batch)
        trainer.save(folder)


def train_in_processes(name, *, processes, devices, **options):
    """Train a model of the zoo in several processes; each must end with the same result."""
    with tempfile.TemporaryDirectory() as folder:
        job = {"model": name, "options": {"devices": devices, **options}, "out": folder}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(processes), str(HERE / "job.py"), json.dumps(job)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
        results = [json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())]
    assert done.returncode == 0, done.stderr
    assert len(results) == processes
    assert all(result == results[0] for result in results)
    return results[0]


def train_by_command(*, devices, **more):
    """Train by the command line; return what its JSON says of the result."""
    words = ["train", "--model", "mlp", "--data", "digits", "--batch-size", "256", "--epochs", "2"]
    words += [
        "--devices",
        devices,
        "--json",
        "-",
        *(word for pair in more.items() for word in pair),
    ]
    if more:  # processes, which are started from one
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command, options = [sys.executable, "-m", "evenstep", *words], {"env": environment}
        said = subprocess.run(command, capture_output=True, timeout=110, check=True, **options)
    else:
        said = CliRunner().invoke(evenstep.cli.main, words, catch_exceptions=False)
    document = json.loads(said.stdout)
    return {
        "fingerprint": document["fingerprint"],
        "fingerprint 2": document["fingerprint_2"],
    }


def _in_one_or_many(name, **experiment):
    """Return a run that trains in one process, or in several where a layout says so."""

    def train(processes=1, **options):
        if processes > 1:
            return train_in_processes(name, processes=processes, **options, **experiment)
        return train_zoo(name, **options, **experiment)

    return train


TWO_PROCESSES = {
    "1": {"devices": 1},
    "2 processes of 1": {"devices": 1, "processes": 2},
    "2 processes of 2": {"devices": 2, "processes": 2},
}


def _resumed(first, options, **more):
    return {"first": first, "options": options, **more}


def _zoo(layouts, *given, slow=(), **experiment):
    return Run(functools.partial(train_zoo, *given, **experiment), layouts, slow)


def _digits(layouts, make_model, slow=(), **experiment):
    return Run(functools.partial(train_digits, make_model, **experiment), layouts, slow)


def _of(cls, **settings):
    """Return what makes an optimizer of some parameters."""
    return lambda parameters: cls(parameters, **settings)


ZOO_RUNS = ("convolution batch_norm dropout recurrent attention tied unused branching mixed_dtypes "
            "noisy")  # fmt: skip
RUNS = {
    **{f"zoo: {name}": _zoo(MANY, name) for name in ZOO_RUNS.split()},
    "optimizer: AdamW, V = 3": _zoo(MIXED, "attention", _of(torch.optim.AdamW, lr=0.01), shards=3),
    "optimizer: NAdam": _zoo(MIXED, "tied", _of(torch.optim.NAdam, lr=0.01)),
    "optimizer: RMSprop, centered": _zoo(
        MIXED, "convolution", _of(torch.optim.RMSprop, lr=0.01, centered=True)
    ),
    "optimizer: Adagrad": _zoo(MIXED, "unused", _of(torch.optim.Adagrad, lr=0.05)),
    "optimizer: LBFGS": _zoo(MIXED, "batch_norm", _of(torch.optim.LBFGS, lr=0.1, max_iter=4)),
    "sparse gradients in some shards: SGD": _zoo(
        MIXED, SparseInPlaces, _of(torch.optim.SGD, lr=0.5)
    ),
    "optimizer: SparseAdam": _zoo(MIXED, Table, _of(torch.optim.SparseAdam, lr=0.01)),
    "V = 1": _zoo(ONE_AND_TWO, "batch_norm", shards=1),
    "V = 7": _zoo(MIXED, "dropout", adam, shards=7),
    "V = 16": _zoo(MIXED, "convolution", shards=16, sizes=(32, 48, 16)),
    "bf16": _zoo(MANY, "attention", precision="bf16"),
    "bf16, dropout, Adam": _zoo(MIXED, "dropout", adam, precision="bf16"),
    "contiguous": _zoo(MIXED, "convolution", memory_format="contiguous"),
    "channels_last": _zoo(MIXED, "batch_norm", memory_format="channels_last"),
    "two threads a device": _zoo(ONE_AND_TWO, "convolution", threads=2),
    "batch_norm=sync": _zoo(MIXED, "batch_norm", batch_norm="sync"),
    "batch_norm=sync, V = 5": _zoo(MIXED, "batch_norm", adam, batch_norm="sync", shards=5),
    "in flight: dropout": _zoo(IN_FLIGHT, "dropout", adam),
    "in flight: batch_norm": _zoo(IN_FLIGHT, "batch_norm"),
    "in flight: clipped, scheduled": Run(train_clipped_and_scheduled, IN_FLIGHT),
    "objective: masked dicts": Run(train_objective, MANY),
    "model changed between steps": Run(train_changing_model, IN_FLIGHT),
    "compiled": _zoo(ONE_AND_TWO, "dropout", compile=True),
    "compiled, batch_norm, Adam": _zoo(
        ONE_AND_TWO, "batch_norm", adam, slow=tuple(ONE_AND_TWO), compile=True, sizes=(32, 32)
    ),
    "resumed": Run(
        train_resumed,
        {
            "unbroken": _resumed(None, {"devices": 1}),
            "1, then 3": _resumed({"devices": 1}, {"devices": 3}),
            "2 own, then 2": _resumed({"devices": own(2)}, {"devices": TWO}),
            "in flight 2, then 1": _resumed({"devices": 2}, {"devices": 1}, in_flight=2),
        },
    ),
    "checkpoint of version 0.1.0": Run(load_old_checkpoint, MIXED),
    "processes: dropout": Run(
        _in_one_or_many("dropout"), TWO_PROCESSES, slow=("2 processes of 1", "2 processes of 2")
    ),
    "processes: batch_norm, V = 5": Run(
        _in_one_or_many("batch_norm", shards=5),
        {**TWO_PROCESSES, "3 processes of 1": {"devices": 1, "processes": 3}},
        slow=("2 processes of 1", "2 processes of 2", "3 processes of 1"),
    ),
    "processes: in flight 2": Run(
        _in_one_or_many("recurrent"),
        {
            "1": {"devices": 1},
            "2 processes, in flight 2": {"devices": 1, "processes": 2, "max_in_flight": 2},
        },
        slow=("2 processes, in flight 2",),
    ),
    "lenet on digits": _digits(MIXED, evenstep.models.lenet, steps=6),
    "mlp on digits, two epochs": _digits(ONE_AND_TWO, evenstep.models.mlp, steps=8, batch_size=400),
    "resnet18 on digits": _digits(
        ONE_AND_TWO, evenstep.models.resnet18, tuple(ONE_AND_TWO), steps=2, batch_size=32
    ),
    "command line": Run(
        train_by_command,
        {
            "1": {"devices": "1"},
            "2": {"devices": "2"},
            "2 processes": {"devices": "1", "--processes": "2"},
        },
        slow=("2 processes",),
    ),
}
"""Every golden run by name."""


def results_of(name, number=None):
    """Return the results of the first layouts of a run (by default all), by the layout's name."""
    run = RUNS[name]
    found = {}
    for layout, options in [*run.layouts.items()][:number]:
        with warnings.catch_warnings(), contextlib.redirect_stderr(sys.stderr):
            warnings.simplefilter("ignore")
            found[layout] = run.train(**options)
    return found
