"""With evenstep's steps, Lightning logs the same curves and calls the same hooks as without."""

import pytest
import torch
import torch.nn.functional as F

from marks import LIGHTNING
from reference import assert_same_bits

pytestmark = LIGHTNING


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2}),
        ({"interval": "step"}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        pytest.param({"interval": "epoch"}, {"max_epochs": 4}, marks=pytest.mark.slow),
        pytest.param({"optimizer": "Adam"}, {"limit_train_batches": 2}, marks=pytest.mark.slow),
        pytest.param({}, {"max_epochs": 3, "overfit_batches": 1}, marks=pytest.mark.slow),
    ],
    ids=["accumulated", "schedule by step", "schedule by epoch", "Adam", "overfit"],
)
def test_the_curve_is_that_of_lightning(cases, module, options):
    cases.assert_same_curve(lambda: cases.Classifier(**module), **options)


def test_the_curve_of_lbfgs_is_that_of_lightning(cases):
    """In float64: its steps make a difference of rounding grow."""

    class Precise(cases.Classifier):
        def __init__(self):
            super().__init__(optimizer="LBFGS")
            self.double()

        def forward(self, X):
            return super().forward(X.double())

    cases.assert_same_curve(Precise, rtol=1e-6)


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

    cases.assert_same_curve(lambda: _with_loss_named(Logs()))


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
    cases.assert_same_curve(Words, loader=in_order)


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

    cases.assert_same_curve(Watched, accumulate_grad_batches=2)


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

    cases.assert_same_curve(Named, loader=stream)
    cases.assert_same_curve(Both, loader=both)
