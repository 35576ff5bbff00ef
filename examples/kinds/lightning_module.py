"""A LightningModule, trained by Lightning's Trainer with another strategy."""

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evenstep.integrations.lightning import EvenStrategy


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.losses = []

    def training_step(self, batch, batch_idx):
        X, y = batch
        return F.cross_entropy(self.net(X), y)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader():
    X = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(X, X[:, :4].argmax(1)), batch_size=64, shuffle=True)


OFF = "logger enable_checkpointing enable_progress_bar enable_model_summary"
QUIET = {"max_epochs": -1, **dict.fromkeys(OFF.split(), False)}


def plain(steps=10):
    torch.manual_seed(0)
    model = Classifier()
    trainer = lightning.Trainer(max_steps=steps, accelerator="cpu", devices=1, **QUIET)
    trainer.fit(model, loader())
    return model, trainer.optimizers[0], model.losses


def even(devices="auto", shards=8, steps=10):
    torch.manual_seed(0)
    model = Classifier()
    strategy = EvenStrategy(devices, shards=shards)
    trainer = lightning.Trainer(max_steps=steps, strategy=strategy, **QUIET)
    trainer.fit(model, loader())
    return model, trainer.optimizers[0], model.losses


if __name__ == "__main__":
    print(even()[-1])
