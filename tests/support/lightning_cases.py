"""LightningModules, callbacks and trainings for the tests of `evenstep.integrations.lightning`.

In a module of its own, because the import of Lightning takes seconds.
"""

import functools
import logging

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep.integrations.lightning import EvenStrategy
from grouping import grouped

EXAMPLES, FEATURES, CLASSES = 44, 8, 4
THREE = ["cpu:0", "cpu:1", "cpu:2"]

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def make_data():
    draw = torch.Generator().manual_seed(1)
    X = torch.randn(EXAMPLES, FEATURES, generator=draw)
    return TensorDataset(X, torch.randint(CLASSES, (EXAMPLES,), generator=draw))


def make_loader(**options):
    """Return a loader with batches of 18, 18 and 8 examples."""
    return DataLoader(make_data(), **{"batch_size": 18, "shuffle": True, **options})


class Classifier(lightning.LightningModule):
    def __init__(self, dropout=0.0, normalised=False, optimizer="SGD", interval=None):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        normalise = nn.BatchNorm1d(16) if normalised else nn.Identity()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 16), normalise, nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(16, CLASSES),
        )  # fmt: skip

    def forward(self, X):
        return self.net(X)

    def training_step(self, batch, batch_idx):
        X, y = batch
        scores = self(X)
        loss = F.cross_entropy(scores, y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        X, y = batch
        self.log("val_loss", F.cross_entropy(self(X), y))

    def configure_optimizers(self):
        make = functools.partial(getattr(torch.optim, self.hparams.optimizer), lr=0.1)
        if self.hparams.optimizer == "SGD":
            make = functools.partial(make, momentum=0.9)
        optimizer = make(self.parameters())
        if self.hparams.interval is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        schedule = {"scheduler": scheduler, "interval": self.hparams.interval}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Kept(Logger):
    """A logger that keeps what it is given."""

    name = version = "kept"

    def __init__(self):
        super().__init__()
        self.seen = []

    def log_metrics(self, metrics, step=None):
        self.seen.append((step, dict(metrics)))

    def log_hyperparams(self, *args, **named):
        pass

    def of(self, name):
        return torch.tensor([metrics[name] for _, metrics in self.seen if name in metrics])


class Hooks(Callback):
    """Notes the name of every hook that is called."""

    def __init__(self):
        self.seen = []

    def __getattribute__(self, name):
        if name.startswith(("on_", "setup", "teardown")):
            return lambda *args, **named: object.__getattribute__(self, "seen").append(name)
        return object.__getattribute__(self, name)


def plain(**options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    few = {"max_epochs": 2, "log_every_n_steps": 1, "num_sanity_val_steps": 0}
    files = {"logger": False, "enable_checkpointing": False}
    return lightning.Trainer(**{**quiet, **few, **files, **options})


def even(devices=1, shards=4, strategy=None, **options):
    names = THREE[:devices] if isinstance(devices, int) else devices
    given = grouped(**{"shards": shards, **(strategy or {})})
    return plain(strategy=EvenStrategy(names, **given), **options)


def trained(trainer, module=None, loader=None, *, resume=None, validate=None):
    torch.manual_seed(2)  # for the loader's order
    module = Classifier() if module is None else module
    loader = make_loader() if loader is None else loader
    trainer.fit(module, loader, validate, ckpt_path=resume)
    return module


def state_of(trainer):
    """Return the module's parameters and buffers, and the optimizer's state."""
    states = trainer.optimizers[0].state_dict()["state"]
    held = {f"{number}.{key}": one for number, state in states.items() for key, one in state.items()
            if isinstance(one, torch.Tensor)}  # fmt: skip
    return {**trainer.lightning_module.state_dict(), **held}


def assert_same_curve(make_module, *, loader=make_loader, rtol=2e-5, **options):
    """Train with evenstep and with Lightning alone, and compare what is logged.

    They differ by rounding: Lightning takes a mean over the batch, evenstep adds sums over shards.
    """
    ours = even(2, logger=Kept(), **options)
    theirs = plain(logger=Kept(), **options)
    validate = make_loader(shuffle=False)
    trained(ours, make_module(), loader(), validate=validate)
    trained(theirs, make_module(), loader(), validate=validate)
    steps = [(step, [*metrics]) for step, metrics in theirs.logger.seen]
    assert [(step, [*metrics]) for step, metrics in ours.logger.seen] == steps
    names = {name for _, found in steps for name in found} - {"epoch"}
    assert names
    for name in names:
        found, wanted = ours.logger.of(name), theirs.logger.of(name)
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=1e-6)
    assert len(ours.logger.of("loss")) >= 3
