"""Lightning's checkpoints, and trainers that fit again, with evenstep's steps."""

import pytest
import torch

from evenstep.errors import InputError
from marks import LIGHTNING
from reference import assert_same_bits

pytestmark = LIGHTNING


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
    assert "not saved by EvenStrategy: training resumes from it" in caplog.text


def test_a_checkpoint_of_another_experiment_is_refused(cases, tmp_path):
    saved = cases.even(max_epochs=1)
    cases.trained(saved)
    saved.save_checkpoint(tmp_path / "saved.ckpt")
    other = cases.even(shards=2, max_epochs=2)
    with pytest.raises(InputError, match="trained with shards=4, but EvenStrategy has shards=2"):
        cases.trained(other, resume=tmp_path / "saved.ckpt")


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
