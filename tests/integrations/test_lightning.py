"""Lightning's Trainer with evenstep's steps, against the real library and tiny modules."""

import importlib.util
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from evenstep.errors import ContractError, InputError, ModelError
from evenstep.replicas import Replicas
from reference import assert_same_bits

pytestmark = [
    pytest.mark.xdist_group("lightning"),  # its import takes seconds
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None, reason="pip install evenstep[lightning]"
    ),
]


@pytest.fixture(scope="module")
def cases():
    import lightning_cases

    return lightning_cases


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


def assert_same_curve(cases, make_module, *, make_loader=None, rtol=2e-5, **options):
    """Train with evenstep and with Lightning alone, and compare what is logged.

    They differ by rounding: Lightning takes a mean over the batch, evenstep adds sums over shards.
    """
    make_loader = make_loader or cases.make_loader
    ours = cases.even(2, logger=cases.Kept(), **options)
    theirs = cases.plain(logger=cases.Kept(), **options)
    validate = cases.make_loader(shuffle=False)
    cases.trained(ours, make_module(), make_loader(), validate=validate)
    cases.trained(theirs, make_module(), make_loader(), validate=validate)
    steps = [(step, [*metrics]) for step, metrics in theirs.logger.seen]
    assert [(step, [*metrics]) for step, metrics in ours.logger.seen] == steps
    names = {name for _, found in steps for name in found} - {"epoch"}
    assert names
    for name in names:
        found, wanted = ours.logger.of(name), theirs.logger.of(name)
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=1e-6)
    assert len(ours.logger.of("loss")) >= 3


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2}),
        ({"interval": "step"}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        pytest.param({"interval": "epoch"}, {"max_epochs": 4}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "LBFGS"}, {"rtol": 1e-3}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "Adam"}, {"limit_train_batches": 2}, marks=pytest.mark.slow),
        pytest.param({}, {"max_epochs": 3, "overfit_batches": 1}, marks=pytest.mark.slow),
    ],
    ids=["accumulated", "schedule by step", "schedule by epoch", "LBFGS", "Adam", "overfit"],
)
def test_the_curve_is_that_of_lightning(cases, module, options):
    assert_same_curve(cases, lambda: cases.Classifier(**module), **options)


def test_all_kinds_of_logs(cases):
    class Logs(cases.Classifier):
        def __init__(self):
            super().__init__()
            self.inner = cases.Classifier()

        def training_step(self, batch, batch_idx):
            X, y = batch
            scores = self(X)
            right = (scores.argmax(1) == y).float()
            loss = F.cross_entropy(scores, y)
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            self.log("accuracy", right.mean(), False, True, on_epoch=True)
            self.log_dict({"right": right.sum(), "seen": float(len(y))}, reduce_fx="sum")
            self.log("best", scores.max(), on_epoch=True, on_step=False, reduce_fx=max)
            self.log("worst", scores.min(), on_epoch=True, on_step=False, reduce_fx=torch.min)
            weight = y.sum()
            self.log("weighed", (right * y).sum() / weight, batch_size=int(weight))
            self.log("index", batch_idx)
            self.log("steps", float(self.trainer.global_step + self.current_epoch))
            assert self.inner.trainer.max_epochs == 2
            return {"loss": loss}

    assert_same_curve(cases, lambda: _with_loss_named(Logs()))


def _with_loss_named(module):
    """Log `loss_step` as "loss" too, which the comparison counts."""
    module.on_train_batch_end = lambda outputs, batch, index: module.log("loss", outputs["loss"])
    return module


def test_a_loss_over_the_words_that_count(cases):
    """Some shards have no word that counts."""

    class Words(cases.Classifier):
        def training_step(self, batch):
            X, y = batch
            y = torch.where(y == 0, y, -100)
            loss = F.cross_entropy(self(X), y)
            self.log("loss", loss.nan_to_num(), batch_size=(counted := int((y == 0).sum())))
            return {"loss": loss, "count": counted}

    in_order = lambda: cases.make_loader(shuffle=False)  # noqa: E731
    assert_same_curve(cases, Words, make_loader=in_order)


def test_returned_values_reach_the_hooks(cases):
    seen = []

    class Returns(cases.Classifier):
        def training_step(self, batch, batch_idx):
            X, y = batch
            scores = self(X)
            loss = F.cross_entropy(scores, y)
            accuracy = (scores.argmax(1) == y).float().mean()
            return {"loss": loss, "scores": scores, "accuracy": accuracy}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            scores, labels = outputs["scores"], batch[1]
            accuracy = (scores.argmax(1) == labels).float().mean()
            torch.testing.assert_close(outputs["accuracy"], accuracy)
            torch.testing.assert_close(outputs["loss"], F.cross_entropy(scores, labels))
            seen.append(batch_idx)

    cases.trained(cases.even(2), Returns())
    assert seen == [0, 1, 2] * 2


def test_hooks_are_called_as_in_lightning(cases):
    seen = []
    for make in (cases.even, cases.plain):
        hooks = cases.Hooks()
        run = make(accumulate_grad_batches=2, callbacks=[hooks])
        cases.trained(run, validate=cases.make_loader(shuffle=False))
        seen.append(object.__getattribute__(hooks, "seen"))
    ours, theirs = seen
    assert ours == theirs
    assert {"on_before_zero_grad", "on_after_backward", "on_before_optimizer_step"} <= {*ours}


def test_gradients_in_the_hooks(cases):
    """They are scaled for accumulation as Lightning scales the loss."""

    class Watched(cases.Classifier):
        def norm(self, which):
            gradients = [one.grad for one in self.parameters() if one.grad is not None]
            self.log(which, torch.nn.utils.get_total_norm(gradients), on_step=True)

        def on_before_zero_grad(self, optimizer):
            self.norm("before")

        def on_before_backward(self, loss):
            self.log("loss", loss)
            self.norm("cleared")

        def on_after_backward(self):
            self.norm("after")

        def configure_gradient_clipping(self, optimizer, **options):
            self.clip_gradients(optimizer, 0.1, "norm")

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.norm("clipped")

    assert_same_curve(cases, Watched, accumulate_grad_batches=2)


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


@pytest.mark.parametrize(("left", "right"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_resumed_at_an_epochs_end_on_other_devices(cases, tmp_path, left, right):
    """The loader shuffles, and the module has dropout."""
    module = lambda: cases.Classifier(dropout=0.3, interval="step")  # noqa: E731
    whole, first, second = (
        cases.even(devices, max_epochs=epochs)
        for devices, epochs in ((left, 3), (left, 2), (right, 3))
    )
    cases.trained(whole, module())
    cases.trained(first, module())
    first.save_checkpoint(tmp_path / "saved.ckpt")
    torch.rand(5)
    cases.trained(second, module(), resume=tmp_path / "saved.ckpt")
    assert second.global_step == 9
    assert_same_bits(cases.state_of(second), cases.state_of(whole))


@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_resumed_in_the_middle_of_an_epoch(cases, tmp_path, parts):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    from lightning.pytorch.callbacks import ModelCheckpoint

    def loader():
        return torchdata.StatefulDataLoader(cases.make_data(), batch_size=5, shuffle=True)

    def module():
        return cases.Classifier(dropout=0.3)

    options = {"accumulate_grad_batches": parts, "enable_checkpointing": True}
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    whole = cases.even(1, callbacks=[save], **options)
    cases.trained(whole, module(), loader())
    rest = cases.even(2, **{**options, "enable_checkpointing": False})
    cases.trained(rest, module(), loader(), resume=tmp_path / "step=3.ckpt")
    assert rest.global_step == whole.global_step
    assert_same_bits(cases.state_of(rest), cases.state_of(whole))


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

    assert_same_curve(cases, Measured)
    built = []
    build = Replicas._build
    monkeypatch.setattr(Replicas, "_build", lambda self: built.append(0) or build(self))
    cases.trained(cases.even(3), Measured(), validate=cases.make_loader(shuffle=False))
    assert len(built) == 1


def test_a_plain_checkpoint_is_resumed(cases, tmp_path, caplog):
    """Its number of steps decides what random layers draw."""
    before = cases.plain(max_epochs=1)
    cases.trained(before, cases.Classifier(dropout=0.3))
    before.save_checkpoint(tmp_path / "plain.ckpt")
    one, two = (cases.even(devices, max_epochs=2) for devices in (1, 2))
    for run in (one, two):
        cases.trained(run, cases.Classifier(dropout=0.3), resume=tmp_path / "plain.ckpt")
    assert one.strategy._batches_done == 6
    assert_same_bits(cases.state_of(two), cases.state_of(one))
    assert "not of EvenStrategy: training goes on from its state" in caplog.text


def test_a_checkpoint_of_another_experiment_is_refused(cases, tmp_path):
    saved = cases.even(max_epochs=1)
    cases.trained(saved)
    saved.save_checkpoint(tmp_path / "saved.ckpt")
    other = cases.even(shards=2, max_epochs=2)
    with pytest.raises(InputError, match="trained with shards=4, and EvenStrategy has shards=2"):
        cases.trained(other, resume=tmp_path / "saved.ckpt")


@pytest.mark.slow
def test_callbacks_and_loggers_of_lightning(cases, tmp_path):
    from lightning.pytorch import callbacks, loggers

    def run(make, folder):
        csv = loggers.CSVLogger(folder, flush_logs_every_n_steps=1)
        board = loggers.TensorBoardLogger(folder)
        best = callbacks.ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}")
        stop = callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.1)
        rate = callbacks.LearningRateMonitor("step")
        average = callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=2)
        kinds = {"callbacks": [best, stop, rate, average], "logger": [csv, board]}
        trainer = make(max_epochs=12, enable_checkpointing=True, **kinds)
        module = cases.trained(trainer, validate=cases.make_loader(shuffle=False))
        X = cases.make_data().tensors[0]
        rows = torch.cat(trainer.predict(module, torch.utils.data.DataLoader(X, batch_size=16)))
        torch.testing.assert_close(rows, module.eval()(X))
        header, *rows = (folder / "lightning_logs/version_0/metrics.csv").read_text().split()
        assert {"loss", "val_loss", "lr-SGD"} <= {*header.split(",")}
        assert [*folder.rglob("events.out.tfevents.*")]
        return trainer.current_epoch, len(rows), best.best_model_path[len(str(folder)) :]

    ours = run(cases.even, tmp_path / "even")
    theirs = run(cases.plain, tmp_path / "plain")
    assert ours == theirs
    assert ours[0] < 12


@pytest.mark.slow
def test_callbacks_that_change_the_training(cases):
    """Layers that thaw, parameters that are averaged, a schedule of accumulation."""
    from lightning.pytorch import callbacks

    class Thaws(callbacks.BaseFinetuning):
        def freeze_before_training(self, module):
            self.freeze(module.net[0])

        def finetune_function(self, module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[0], optimizer)

    class Thawing(cases.Classifier):
        def configure_optimizers(self):
            return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1)

    def kinds():
        return [
            Thaws(),
            callbacks.WeightAveraging(),
            callbacks.GradientAccumulationScheduler({1: 2}),
        ]

    runs = [make(callbacks=kinds(), max_epochs=3) for make in (cases.even, cases.plain)]
    runs.append(cases.even(2, callbacks=kinds(), max_epochs=3))
    ours, theirs, two = (cases.trained(run, Thawing()).state_dict() for run in runs)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert_same_bits(two, ours)


def test_a_trainer_fits_again(cases):
    """Random layers go on where they were."""
    loader = cases.make_loader(shuffle=False)

    def module():
        return cases.Classifier(dropout=0.3, optimizer="Rprop")

    one, two = (cases.even(devices, max_epochs=1) for devices in (1, 2))
    for run in (one, two):
        learner = cases.trained(run, module(), loader)
        run.fit_loop.max_epochs = 2
        run.fit(learner, loader)
    assert one.strategy._batches_done == 6
    assert_same_bits(cases.state_of(two), cases.state_of(one))


@pytest.mark.slow
def test_the_tuners_of_lightning(cases):
    """The steps of a search for a learning rate are undone, also for random layers."""
    from lightning.pytorch.tuner import Tuner

    class Tuned(cases.Classifier):
        def __init__(self):
            super().__init__(dropout=0.3)
            self.lr = 0.1

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    run = cases.even(max_epochs=2)
    module = Tuned()
    Tuner(run).lr_find(module, cases.make_loader(), num_training=5, update_attr=False)
    searched = cases.trained(run, module)
    direct = cases.trained(cases.even(2, max_epochs=2), Tuned())
    assert_same_bits(searched.state_dict(), direct.state_dict())


@pytest.mark.slow
def test_any_data(cases):
    """Streams, workers, dicts, and two loaders at once."""

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            X, y = cases.make_data().tensors
            return iter(
                [{"X": one, "y": label, "name": "x"} for one, label in zip(X, y, strict=True)]
            )

    class Named(cases.Classifier):
        def training_step(self, batch, batch_idx):
            return super().training_step((batch["X"], batch["y"]), batch_idx)

    class Both(cases.Classifier):
        def training_step(self, batches, batch_idx):
            left, right = batches["left"], batches["right"]
            pair = torch.cat([left[0], right[0]]), torch.cat([left[1], right[1]])
            return super().training_step(pair, batch_idx)

    def drop_names(rows):
        batch = torch.utils.data.default_collate(rows)
        return {**batch, "name": None}

    def stream():
        options = {"batch_size": 11, "num_workers": 1, "collate_fn": drop_names}
        return torch.utils.data.DataLoader(Stream(), **options)

    def both():
        return {side: cases.make_loader(batch_size=11, shuffle=False) for side in ("left", "right")}

    assert_same_curve(cases, Named, make_loader=stream)
    assert_same_curve(cases, Both, make_loader=both)


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


# ---- what is refused


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


@pytest.mark.parametrize("kind", ["list", "dict"])
@pytest.mark.parametrize("devices", [1, 2])
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
        ({"sync_batchnorm": True}, r"EvenStrategy\(batch_norm='sync'\)"),
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
    with pytest.raises(InputError, match=r"training_step\(dataloader_iter\): let it take"):
        cases.trained(cases.even(), Fetches())


@pytest.mark.slow
def test_compiled_modules_are_refused(cases):
    with pytest.raises(InputError, match="torch.compile: give the module as it was before"):
        cases.trained(cases.even(), torch.compile(cases.Classifier()))
    module = cases.Classifier()
    module.net.compile()
    with pytest.raises(ContractError, match="the layer net was compiled by torch.compile"):
        cases.trained(cases.even(), module)


def test_options_that_do_not_fit_are_refused(cases):
    with pytest.raises(InputError, match=r"EvenStrategy got precision=\.\.\.: give some of"):
        cases.EvenStrategy(precision="bf16")


def test_several_processes_are_refused(cases, monkeypatch):
    run = cases.even()
    monkeypatch.setattr(run.strategy.cluster_environment, "world_size", lambda: 2)
    with pytest.raises(InputError, match="several processes: start one"):
        cases.trained(run)


@pytest.mark.slow
def test_evenstep_does_not_import_lightning():
    program = "import sys, evenstep; assert 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
def test_a_line_says_what_is_missing(name):
    program = f"import sys; sys.modules[{name!r}] = None; import evenstep.integrations.{name}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert f"ImportError: evenstep.integrations.{name} needs {name}: pip install" in done.stderr
