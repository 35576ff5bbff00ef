"""A load that fails leaves model, optimizer and scheduler as they were."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, SequentialLR, StepLR

import evenstep
from evenstep.checkpoint.codec import encode
from evenstep.checkpoint.files import read_checkpoint, write_checkpoint
from evenstep.checkpoint.fingerprint import extra_states
from evenstep.errors import CheckpointError
from reference import assert_same_bits, whole_state
from zoo import make_batches

LOSS = nn.CrossEntropyLoss()
BATCHES = make_batches((16, 16))


class Counting(nn.Module):
    """A layer with extra state."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, x):
        return x

    def get_extra_state(self):
        return {"steps": self.steps}

    def set_extra_state(self, state):
        self.steps = state["steps"]


class Forgetting(Counting):
    def set_extra_state(self, state):
        pass


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def parts(make_optimizer=sgd, layer=Counting, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Flatten(), Counting(), nn.Linear(36, 8), nn.BatchNorm1d(8), layer(), nn.Linear(8, 5)
    )
    optimizer = make_optimizer(model.parameters())
    return model, optimizer, StepLR(optimizer, 1, gamma=0.5)


def stepped(trainer):
    for batch in BATCHES:
        trainer.step(*batch)
        trainer.scheduler.step()
        for layer in trainer.model:
            layer.steps = trainer.steps_done


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """What a trainer saves after two steps."""
    folder = tmp_path_factory.mktemp("run")
    model, optimizer, scheduler = parts()
    with evenstep.Trainer(model, optimizer, LOSS, scheduler=scheduler, devices=1) as trainer:
        stepped(trainer)
        trainer.save(folder)
    return read_checkpoint(folder)


def everything(model, optimizer, scheduler):
    return {
        **whole_state(model, optimizer),
        "extra": extra_states(model),
        "groups": optimizer.state_dict()["param_groups"],
        "scheduler": scheduler.state_dict(),
    }


def refused(folder, tree, model, optimizer, scheduler, error=CheckpointError):
    """Return what is said of a checkpoint; everything must stay as it was."""
    write_checkpoint(folder, encode(tree), step=2)
    with evenstep.Trainer(model, optimizer, LOSS, scheduler=scheduler, devices=1) as trainer:
        stepped(trainer)
    for layer in model:
        layer.steps = 7
    before = copy.deepcopy(everything(model, optimizer, scheduler))
    with pytest.raises(error) as caught:
        evenstep.Trainer.load(folder, model, optimizer, LOSS, scheduler=scheduler, devices=1)
    assert_same_bits(everything(model, optimizer, scheduler), before)
    return str(caught.value)


def without_kinds(tree):
    """A checkpoint as version 0.1.0 wrote it."""
    return {key: value for key, value in tree.items() if key != "optimizers"}


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_state_that_another_optimizer_does_not_take(tree, tmp_path, kind):
    line = refused(tmp_path, without_kinds(tree), *parts(lambda p: kind(p, lr=0.01), seed=9))
    assert line.startswith(
        f"the checkpoint is of a different optimizer than {kind.__name__} with 1"
    )


def test_settings_that_the_checkpoint_of_another_optimizer_lacks(tree, tmp_path):
    """Loaded without complaint, and failed in the first step."""
    line = refused(tmp_path, without_kinds(tree), *parts(torch.optim.LBFGS, seed=9))
    assert line.startswith(
        "the checkpoint is of a different optimizer than LBFGS: the saved parameter groups have no "
        "max_iter, "
    )


class Interrupted(torch.optim.SGD):
    """Ctrl-C is pressed when half of the state has been loaded."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        if self.param_groups[0]["lr"] == 0.025:
            raise KeyboardInterrupt


def test_ctrl_c_half_way(tree, tmp_path):
    """The rates differ after other numbers of scheduler steps, so that a roll-back passes."""
    model, optimizer, scheduler = parts(lambda p: Interrupted(p, lr=0.4, momentum=0.9), seed=9)
    refused(tmp_path, without_kinds(tree), model, optimizer, scheduler, KeyboardInterrupt)


def test_extra_state_that_is_not_taken_back(tree, tmp_path):
    tree = copy.deepcopy(tree)
    tree["facts"]["layers"]["layer 4"] = "Forgetting()"
    line = refused(tmp_path, tree, *parts(layer=Forgetting, seed=9))
    assert line.startswith("layer 4 of type Forgetting did not take its extra state back")


def test_a_scheduler_of_another_kind(tree, tmp_path):
    model, optimizer, _ = parts(seed=9)
    schedulers = [ConstantLR(optimizer), ConstantLR(optimizer)]
    scheduler = SequentialLR(optimizer, schedulers, [3])
    line = refused(tmp_path, tree, model, optimizer, scheduler)
    module = "torch.optim.lr_scheduler"
    assert line.startswith(
        f"can't resume with the class of the scheduler {module}.SequentialLR instead of "
        f"{module}.StepLR, the class of the scheduler.0 {module}.ConstantLR instead of none"
    )
    older = {**tree, "facts": {k: v for k, v in tree["facts"].items() if k != "scheduler"}}
    line = refused(tmp_path, older, model, optimizer, scheduler)
    assert line.startswith(
        "the checkpoint is of a different scheduler than SequentialLR: KeyError("
    )


def test_a_scheduler_that_would_take_the_state_of_another_one(tree, tmp_path):
    """The state of any scheduler loads into nearly any other."""
    model, optimizer, _ = parts(seed=9)
    scheduler = ExponentialLR(optimizer, 0.9)
    line = refused(tmp_path, tree, model, optimizer, scheduler)
    assert "the checkpoint is of a different scheduler: give the one that was trained with" in line


def test_another_fingerprint(tree, tmp_path):
    line = refused(tmp_path, {**tree, "fingerprint": "0" * 64}, *parts(seed=9))
    assert "fingerprint" in line
