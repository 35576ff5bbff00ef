"""Runs stopped anywhere and resumed on other devices end with the bits of uninterrupted ones."""

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import CheckpointError, InputError
from grouping import grouped
from layouts import own
from reference import assert_same_bits, whole_state
from resuming import LOSS, OPTIMIZERS, SCHEDULERS, X, Y, parts, run


def uninterrupted(steps, *names):
    model, optimizer, options = parts(*names)
    with evenstep.Trainer(model, optimizer, LOSS, **grouped(devices=1, **options)) as trainer:
        run(trainer, steps)
    return trainer


@pytest.mark.parametrize(("stop", "devices"), [(1, 1), (3, 3), (5, 2), (1, own(2))], ids=str)
def test_resuming_on_other_devices_mid_epoch(tmp_path, stop, devices):
    model, optimizer, _ = parts()
    with evenstep.Trainer(model, optimizer, LOSS, devices=2) as trainer:
        run(trainer, stop)
        trainer.save(tmp_path)
    model, optimizer, _ = parts(seed=9)
    with evenstep.Trainer.load(tmp_path, model, optimizer, LOSS, devices=devices) as resumed:
        assert resumed.steps_done == stop
        run(resumed, 8)
    whole = uninterrupted(8)
    assert resumed.fingerprint() == whole.fingerprint()
    assert_same_bits(whole_state(model, optimizer), whole_state(whole.model, whole.optimizer))


# Each model, optimizer and scheduler once.
PARTS = [
    ("convolution", "sgd", "one cycle"),
    ("recurrent", "adam", "plateau"),
    ("tied", "adagrad", "steps"),
    ("unused", "asgd", "warm restarts"),
    ("branching", "lbfgs", "sequential"),
    ("mixed_dtypes", "adam", "none"),
    ("noisy", "sgd", "none"),
    ("batch_norm", "sgd", "holds another"),
]


def test_each_optimizer_and_scheduler_is_resumed():
    assert {optimizer for _, optimizer, _ in PARTS} == {*OPTIMIZERS}
    assert {scheduler for *_, scheduler in PARTS} == {*SCHEDULERS}


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # of torch 2.6's own SequentialLR
@pytest.mark.parametrize("names", PARTS, ids="-".join)
def test_everything_that_training_continues_from_is_saved(tmp_path, names):
    model, optimizer, options = parts(*names)
    with evenstep.Trainer(model, optimizer, LOSS, **grouped(devices=3, **options)) as trainer:
        run(trainer, 4)
        trainer.save(tmp_path)
    model, optimizer, options = parts(*names, seed=9)
    resumed = evenstep.Trainer.load(
        tmp_path, model, optimizer, LOSS, **grouped(devices=2, **options)
    )
    with resumed:
        run(resumed, 7)
    whole = uninterrupted(7, *names)
    assert resumed.fingerprint() == whole.fingerprint()
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == [group["lr"] for group in whole.optimizer.param_groups]


@pytest.fixture
def saved(tmp_path):
    model, optimizer, _ = parts("convolution")
    with evenstep.Trainer(model, optimizer, LOSS, devices=1, shards=4, seed=6) as trainer:
        run(trainer, 2)
        trainer.save(tmp_path)
    return tmp_path


def test_shards_and_seed_come_from_the_checkpoint(saved):
    model, optimizer, _ = parts("convolution")
    trainer = evenstep.Trainer.load(saved, model, optimizer, LOSS, devices=2)
    assert (trainer.experiment.shards, trainer.experiment.seed) == (4, 6)


def of_another_shape():
    model, _, _ = parts("convolution")
    model[4] = nn.Linear(20, 7)
    return model, OPTIMIZERS["sgd"](model.parameters())


def with_other_groups():
    model, _, _ = parts("convolution")
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lambda: parts("dropout")[:2],
            r"parameter 1\.weight float32 \(16, 36\) instead of none, .*a different model",
        ),
        (of_another_shape, r"4\.weight float32 \(7, 20\) instead of float32 \(5, 20\)"),
        (with_other_groups, "the parameters of group 0"),
        (lambda: parts("convolution", "adam")[:2], "optimizer"),
    ],
    ids=["model", "shape", "groups", "optimizer"],
)
def test_another_model_or_optimizer_is_refused_by_name(saved, make, line):
    with pytest.raises(CheckpointError, match=line):
        evenstep.Trainer.load(saved, *make(), LOSS, devices=1)


@pytest.mark.parametrize("version", [0, 3, "1"])
def test_a_fingerprint_has_version_1_or_2(version):
    model, optimizer, _ = parts("convolution")
    trainer = evenstep.Trainer(model, optimizer, LOSS, devices=1)
    assert trainer.fingerprint() == trainer.fingerprint(version=1)
    assert trainer.fingerprint() != trainer.fingerprint(version=2)
    with pytest.raises(InputError, match=f"got version={version!r}: there are versions 1 and 2"):
        trainer.fingerprint(version=version)


def test_a_scheduler_that_was_not_saved_is_refused(saved):
    model, optimizer, options = parts("convolution", "sgd", "steps")
    with pytest.raises(CheckpointError, match="without a learning-rate scheduler"):
        evenstep.Trainer.load(saved, model, optimizer, LOSS, **grouped(devices=1, **options))


def test_a_state_that_is_not_restored_is_noticed(saved, monkeypatch):
    """Training must not continue silently from another state than was saved."""
    model, optimizer, _ = parts("convolution")
    monkeypatch.setattr("evenstep.checkpoint.restore.restore_optimizer", lambda *_: None)
    with pytest.raises(CheckpointError, match="fingerprint"):
        evenstep.Trainer.load(saved, model, optimizer, LOSS, devices=1)


def test_a_training_by_epochs_is_saved_whole(tmp_path, caplog):
    model, optimizer, _ = parts("convolution")
    with evenstep.Trainer(model, optimizer, LOSS, devices=1) as trainer:
        run(trainer, 2)
        trainer.save(tmp_path)
    assert "does not hold" not in caplog.text


class Counting(nn.Module):
    """Has a buffer that its state_dict leaves out, and that the next step depends on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(36, 5)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x):
        scale = self.scale.clone()
        if self.training:
            self.scale.mul_(0.5)
        return self.head(x.flatten(1)) * scale


def test_a_buffer_that_is_not_persistent_is_saved(tmp_path):
    def new():
        model = Counting()
        return model, torch.optim.SGD(model.parameters(), lr=0.1), LOSS

    options = grouped(devices=2, buffers={"scale": "first"})
    with evenstep.Trainer(*new(), **options) as trainer:
        trainer.step(X, Y)
        trainer.step(X, Y)
        trainer.save(tmp_path)
    resumed = evenstep.Trainer.load(tmp_path, *new(), devices=2)
    assert float(resumed.model.scale) == 0.25
    assert resumed.fingerprint() == trainer.fingerprint()


class OneCounter(torch.optim.Optimizer):
    """Divides its rate by one count of steps, which all parameters have in common."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        for parameter in group["params"]:
            first = self.state[group["params"][0]]
            self.state[parameter].setdefault("step", first.setdefault("step", torch.zeros(())))
        self.state[group["params"][0]]["step"] += 1
        for parameter in group["params"]:
            rate = group["lr"] / self.state[parameter]["step"].item()
            parameter.sub_(parameter.grad, alpha=rate)


def test_a_tensor_that_parameters_have_in_common_stays_one(tmp_path):
    def made():
        model, _, _ = parts("convolution")
        return model, OneCounter(model.parameters()), LOSS

    with evenstep.Trainer(*made(), devices=1) as whole:
        run(whole, 3)
        whole.save(tmp_path)
        run(whole, 6)
    with evenstep.Trainer.load(tmp_path, *made(), devices=2) as resumed:
        run(resumed, 6)
    assert resumed.fingerprint() == whole.fingerprint()
