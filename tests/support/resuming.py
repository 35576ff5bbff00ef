"""Trainings that are saved and resumed: their models, optimizers, schedulers and data."""

import torch
from torch import nn

from evenstep.checkpoint.codec import encode
from evenstep.checkpoint.files import list_checkpoints, read_checkpoint, write_checkpoint
from evenstep.data import Loader
from zoo import build, make_batches, options_of

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}
SCHEDULES = torch.optim.lr_scheduler


class WarmUp(SCHEDULES.LRScheduler):
    """Raises the rate for three steps, then leaves it to another scheduler, which it holds."""

    def __init__(self, optimizer, after):
        self.after = after
        super().__init__(optimizer)

    def get_lr(self):
        return [rate * self.last_epoch / 3 for rate in self.base_lrs]

    def step(self):
        if getattr(self, "last_epoch", 0) < 3:
            super().step()
        else:
            self.after.step()


SCHEDULERS = {
    "none": lambda optimizer: None,
    "one cycle": lambda o: SCHEDULES.OneCycleLR(o, 0.2, total_steps=20),
    "plateau": lambda o: SCHEDULES.ReduceLROnPlateau(o, patience=0),
    "steps": lambda o: SCHEDULES.MultiStepLR(o, [2, 5, 6]),
    "warm restarts": lambda o: SCHEDULES.CosineAnnealingWarmRestarts(o, T_0=2),
    "sequential": lambda o: SCHEDULES.SequentialLR(
        o, [SCHEDULES.LinearLR(o, total_iters=2), SCHEDULES.ExponentialLR(o, 0.9)], [2]
    ),
    "holds another": lambda o: WarmUp(o, SCHEDULES.StepLR(o, 2)),
}
LOSS = nn.CrossEntropyLoss()
X, Y = make_batches((53,))[0]
LOADER = Loader(torch.utils.data.TensorDataset(X, Y), 18, seed=3)  # 3 batches an epoch, the last 17


def parts(name="batch_norm", optimizer="sgd", scheduler="none", seed=0):
    model = build(name, seed)
    made = OPTIMIZERS[optimizer](model.parameters())
    made_scheduler = SCHEDULERS[scheduler](made)
    options = {} if made_scheduler is None else {"scheduler": made_scheduler}
    return model, made, {**options_of(model), **options}


def run(trainer, steps):
    """Train until `steps` steps since the start of the training are done."""
    while trainer.steps_done < steps:
        for batch in trainer.epoch(LOADER):
            loss = trainer.step(*batch)
            if isinstance(trainer.scheduler, SCHEDULES.ReduceLROnPlateau):
                trainer.scheduler.step(float(loss))
            elif trainer.scheduler:
                trainer.scheduler.step()
            if trainer.steps_done == steps:
                return


def rewritten(folder, change):
    """Change the encoded state of a checkpoint, and seal it again."""
    (path,) = list_checkpoints(folder)
    tree = read_checkpoint(path)
    change(tree)
    write_checkpoint(folder, encode(tree), step=int(path.name[5:]))
