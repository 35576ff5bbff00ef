"""Lightning's Trainer with evenstep's steps: one result on any devices."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from evenstep.batch.seeds import shard_seed
from evenstep.replicas import Replicas
from marks import LIGHTNING
from reference import assert_same_bits

pytestmark = LIGHTNING


def test_one_result_on_two_devices(cases):
    """With dropout, BatchNorm, clipping and accumulation, and the same logs."""
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    runs = [cases.even(devices, **options, logger=cases.Kept()) for devices in (1, 2)]
    for run in runs:
        cases.trained(run, cases.Classifier(dropout=0.2, normalised=True))
    one, two = runs
    assert_same_bits(cases.state_of(two), cases.state_of(one))
    assert two.logger.seen == one.logger.seen
    assert len(one.logger.of("loss")) == 4  # of 6 batches, those with an update


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [{}, {"batch_norm": "sync"}, {"seed": 1}], ids=str)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_one_result_on_any_devices(cases, strategy, precision, optimizer):
    options = {"strategy": strategy, "precision": precision, "logger": cases.Kept()}
    layouts = [1, 2, 3] if "batch_norm" in strategy else [1, 2, 3, ["cpu:0", "cpu:1:own"]]
    runs = [cases.even(devices, **options) for devices in layouts]
    for run in runs:
        module = cases.Classifier(dropout=0.2, normalised=True, optimizer=optimizer)
        cases.trained(run, module, validate=cases.make_loader(shuffle=False))
    one, *others = runs
    for other in others:
        assert_same_bits(cases.state_of(other), cases.state_of(one))
        assert other.logger.seen == one.logger.seen


def test_the_seed_decides(cases):
    runs = [cases.even(strategy={"seed": seed}, max_steps=1) for seed in (0, 1)]
    one, other = (cases.trained(run, cases.Classifier(dropout=0.5)) for run in runs)
    assert not torch.equal(one.net[0].weight, other.net[0].weight)


def test_each_step_draws_numbers_of_its_own(cases):
    """With one shard, as after `torch.manual_seed` with the seed of the step."""

    class Draws(cases.Classifier):
        def training_step(self, batch, batch_idx):
            self.log("drawn", torch.rand(()))
            return super().training_step(batch, batch_idx)

    run = cases.even(2, shards=1, strategy={"seed": 3}, logger=cases.Kept())
    cases.trained(run, Draws())
    seeds = [shard_seed(3, 0, step, 0) for step in range(6)]
    expected = [torch.rand((), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    assert run.logger.of("drawn").tolist() == [float(one) for one in expected]


def test_norms_are_computed_by_one_thread(cases):
    """Sums over large tensors depend on the number of threads."""
    found = set()

    class Counts(cases.Classifier):
        def on_after_backward(self):
            found.add(torch.get_num_threads())

        def on_before_optimizer_step(self, optimizer):
            found.add(torch.get_num_threads())

    torch.set_num_threads(2)
    cases.trained(cases.even(max_epochs=1, accumulate_grad_batches=2), Counts())
    assert found == {1}
    assert torch.get_num_threads() == 2


def test_copies_of_the_module_are_made_once(cases, monkeypatch):
    """What Lightning and metrics change in the module between steps is no reason to do it again."""
    import torchmetrics

    class Measured(cases.Classifier):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.ModuleDict({"right": torchmetrics.MeanMetric()})

        def training_step(self, batch, batch_idx):
            X, y = batch
            scores = self(X)
            return {"loss": F.cross_entropy(scores, y), "scores": scores}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.inner["right"]((outputs["scores"].argmax(1) == batch[1]).float())
            self.log("right", self.inner["right"], on_step=True, on_epoch=True)
            self.log("loss", outputs["loss"])

    cases.assert_same_curve(Measured)
    built = []
    build = Replicas._build
    monkeypatch.setattr(Replicas, "_build", lambda self: built.append(0) or build(self))
    cases.trained(cases.even(3), Measured(), validate=cases.make_loader(shuffle=False))
    assert len(built) == 1


@pytest.mark.slow
def test_pytorch_lightning():
    """The older name is another library, with classes of its own."""
    pytest.importorskip("pytorch_lightning")
    program = """
import torch, pytorch_lightning as pl
from evenstep.integrations.pytorch_lightning import EvenStrategy

class Small(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Dropout(0.5))

    def training_step(self, batch, batch_idx):
        self.log("loss", loss := self.net(batch).square().mean())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

for devices in (1, 2):
    torch.manual_seed(0)
    module, data = Small(), torch.utils.data.DataLoader(torch.randn(80, 4), batch_size=16)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(strategy=EvenStrategy(devices), max_epochs=2, **options)
    trainer.fit(module, data)
    print("result", module.net[0].weight.tolist(), trainer.callback_metrics["loss"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, two = (line for line in done.stdout.splitlines() if line.startswith("result"))
    assert one == two


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
def test_a_line_says_what_is_missing(name):
    program = f"import sys; sys.modules[{name!r}] = None; import evenstep.integrations.{name}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f"ImportError: evenstep.integrations.{name} needs {name}: pip install" in done.stderr
