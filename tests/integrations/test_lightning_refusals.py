"""What a LightningModule can't do in a step of evenstep, and settings that don't fit."""

import pytest
import torch
import torch.nn.functional as F

from evenstep import Experiment, Layout, Stages
from evenstep.errors import ContractError, InputError, ModelError
from marks import LIGHTNING
from reference import assert_same_bits

pytestmark = LIGHTNING


def test_shards_keep_no_state_in_the_module(cases):
    class Carries(cases.Classifier):
        def training_step(self, batch, batch_idx):
            self.last = getattr(self, "last", 0.0) * 0.5 + self(batch[0]).mean().detach()
            return F.cross_entropy(self(batch[0]) + self.last, batch[1])

    with pytest.raises(ContractError, match=r"model\.last"):
        cases.trained(cases.even(), Carries())


def test_a_loss_that_is_no_mean_over_the_examples(cases):
    class Sums(cases.Classifier):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1], reduction="sum")

    with pytest.raises(ContractError, match="does not add up over the shards") as raised:
        cases.trained(cases.even(), Sums())
    assert "it must return the mean loss over the shard's examples" in raised.value.__notes__[-1]


@pytest.mark.parametrize(("kind", "devices"), [("list", 2), ("dict", 1)])
def test_shards_collect_nothing_in_the_module(cases, kind, devices):
    class Collects(cases.Classifier):
        def __init__(self):
            super().__init__()
            self.kept = {"list": [], "dict": {"train": []}}[kind]

        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            (self.kept["train"] if kind == "dict" else self.kept).append(loss.detach())
            return loss

    with pytest.raises(ContractError, match=r"training_step adds to Collects\.kept.* return"):
        cases.trained(cases.even(devices), Collects())


def test_a_cache_in_the_module(cases):
    class Caches(cases.Classifier):
        cache = None

        def training_step(self, batch, batch_idx):
            if self.cache is None:
                self.cache = {}
            scale = self.cache.setdefault(len(batch[0]), torch.ones(()))
            return F.cross_entropy(self(batch[0]) * scale, batch[1])

    one, two = (cases.even(devices) for devices in (1, 2))
    for run in (one, two):
        cases.trained(run, Caches())
    assert_same_bits(cases.state_of(two), cases.state_of(one))


def _logs_metric(self, loss):
    self.log("x", self.metric)


def _logs_metrics(self, loss):
    self.log_dict(self.metrics)


def _updates_metric(self, loss):
    self.metric.update(loss)
    return loss


def _calls_metrics(self, loss):
    self.metrics["mean"](loss)
    return loss


def _logs_rows(self, loss):
    self.log("x", torch.ones(3))


def _logs_product(self, loss):
    self.log("x", loss, reduce_fx="prod")


def _logs_twice(self, loss):
    self.log("x", loss)
    self.log("x", loss)


def _logs_sometimes(self, loss):
    if loss > 1.45:
        self.log("x", loss)


def _returns_nothing(self, loss):
    return None


def _returns_text(self, loss):
    return {"loss": loss, "text": "x"}


def _returns_no_row(self, loss):
    return {"loss": loss, "x": torch.ones(2)}


def _logs_in_backward(self, loss):
    scores = self.net[0].weight * 1
    scores.register_hook(lambda gradient: self.log("x", gradient.norm()))
    return loss + scores.sum()


@pytest.mark.parametrize(
    ("does", "error", "line"),
    [
        (_logs_metric, InputError, r"self\.log\('x'\) with a MeanMetric"),
        (_logs_metrics, InputError, r"self\.log\('mean'\) with a MeanMetric"),
        (_updates_metric, ContractError, r"training_step adds to Does\.metric, .* return"),
        (_calls_metrics, ContractError, r"training_step adds to Does\.metrics\.mean"),
        (_logs_rows, InputError, r"self\.log\('x'\) with a Tensor"),
        (_logs_product, InputError, r"self\.log\('x'\) with reduce_fx='prod'"),
        (_logs_twice, ModelError, r"self\.log\('x'\) twice"),
        (_logs_sometimes, ModelError, r"self\.log\('x'\)"),
        (_returns_nothing, ModelError, "training_step returned None"),
        (_returns_text, ModelError, "training_step returned 'x' as 'text'"),
        (_returns_no_row, ModelError, "the output 'x'"),
        (_logs_in_backward, InputError, r"self\.log\('x'\) was called in the backward pass"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_what_a_step_can_not_do(cases, does, error, line):
    import torchmetrics

    class Does(cases.Classifier):
        def __init__(self):
            super().__init__()
            self.metric = torchmetrics.MeanMetric()
            self.metrics = torchmetrics.MetricCollection({"mean": torchmetrics.MeanMetric()})

        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            result = does(self, loss)
            return loss if does.__name__.startswith("_logs_") and result is None else result

    with pytest.raises(error, match=line):
        cases.trained(cases.even(2), Does())


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"devices": 2}, r"devices=2: leave it out, and give EvenStrategy\(devices="),
        ({"num_nodes": 2}, "num_nodes=2: leave it out"),
        ({"precision": "64-true"}, "precision='64-true': use '32-true' or 'bf16-mixed'"),
        ({"precision": "bf16-true"}, "precision='bf16-true'"),
        ({"sync_batchnorm": True}, r"Experiment\(batch_norm='sync'\)"),
    ],
    ids=lambda one: "=".join(map(str, *one.items())) if isinstance(one, dict) else None,
)
def test_settings_that_do_not_fit_are_refused(cases, options, line):
    with pytest.raises(InputError, match=line):
        cases.trained(cases.plain(strategy=cases.EvenStrategy(1), **options))


def test_modules_that_do_not_fit_are_refused(cases):
    class Fetches(cases.Classifier):
        def training_step(self, dataloader_iter):
            raise AssertionError

    manual = cases.Classifier()
    manual.automatic_optimization = False
    with pytest.raises(InputError, match="automatic_optimization=False: use evenstep.Trainer"):
        cases.trained(cases.even(), manual)
    with pytest.raises(InputError, match=r"training_step\(dataloader_iter\): write training_step"):
        cases.trained(cases.even(), Fetches())


@pytest.mark.slow
def test_compiled_modules_are_refused(cases):
    with pytest.raises(InputError, match="torch.compile: give the module itself"):
        cases.trained(cases.even(), torch.compile(cases.Classifier()))
    module = cases.Classifier()
    module.net.compile()
    with pytest.raises(ContractError, match="the layer net was compiled by torch.compile"):
        cases.trained(cases.even(), module)


def test_options_that_do_not_fit_are_refused(cases):
    clipped, staged = Experiment(clip_norm=1.0), Layout(divide=Stages())
    with pytest.raises(InputError, match="EvenStrategy got clip_norm=1.0: use Lightning's"):
        cases.EvenStrategy(experiment=clipped)
    with pytest.raises(InputError, match="EvenStrategy got divide=.*: leave it out"):
        cases.EvenStrategy(layout=staged)
    with pytest.raises(InputError, match=r"got faults='off': give an evenstep.Faults\(...\)"):
        cases.EvenStrategy(faults="off")


def test_several_processes_are_refused(cases, monkeypatch):
    run = cases.even()
    monkeypatch.setattr(run.strategy.cluster_environment, "world_size", lambda: 2)
    with pytest.raises(InputError, match="several processes: start one"):
        cases.trained(run)


def test_several_processes_are_refused_when_the_strategy_is_made(cases, monkeypatch):
    variables = {"TORCHELASTIC_RUN_ID": "test", "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="EvenStrategy got several processes: start one"):
        cases.EvenStrategy()
