"""Lightning's checkpoints, and trainers that fit again, with evenstep's steps."""

import itertools

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from evenstep.errors import InputError
from marks import LIGHTNING, slow
from reference import assert_same_bits

pytestmark = LIGHTNING


@pytest.mark.parametrize(("left", "right"), [(1, 2), slow(2, 1)])
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


def resumed_at(cases, tmp_path, step, loader, make_module=None, *, every=None, **options):
    """Return a whole training, and one on two devices that was resumed at a step of it."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    make_module = make_module or (lambda: cases.Classifier(dropout=0.3))
    save = ModelCheckpoint(
        tmp_path, filename="{step}", every_n_train_steps=every or step, save_top_k=-1
    )
    whole = cases.even(1, callbacks=[save], enable_checkpointing=True, **options)
    cases.trained(whole, make_module(), loader())
    rest = cases.even(2, **options)
    cases.trained(rest, make_module(), loader(), resume=tmp_path / f"step={step}.ckpt")
    assert rest.global_step == whole.global_step
    assert_same_bits(cases.state_of(rest), cases.state_of(whole))
    return rest


@pytest.mark.parametrize("parts", [1, slow(2)])
def test_resumed_in_the_middle_of_an_epoch(cases, tmp_path, parts):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def loader():
        return torchdata.StatefulDataLoader(cases.make_data(), batch_size=5, shuffle=True)

    resumed_at(cases, tmp_path, 3, loader, accumulate_grad_batches=parts)


def with_state(cases, kind):
    """Return a loader with a state, of 3 batches an epoch, that draws numbers for its examples."""
    import loading

    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    torch.manual_seed(4)
    if kind == "own":
        return Counting(cases)
    if kind == "plain":
        return cases.make_loader(generator=torch.Generator().manual_seed(6))
    if kind in ("stream", "unsized"):
        stream = CountingStream(cases) if kind == "stream" else Unsized(cases)
    if kind == "stateless":
        stream = Stateless(cases)
    if kind in ("stream", "unsized", "stateless"):
        return torchdata.StatefulDataLoader(stream, batch_size=18)
    options = loading.workers() if kind == "workers" else {}
    if kind == "generator":
        options = {"generator": torch.Generator().manual_seed(6)}
    data = cases.make_data() if kind == "workers" else Noisy(*cases.make_data().tensors)
    return torchdata.StatefulDataLoader(data, batch_size=18, shuffle=True, **options)


class Noisy(TensorDataset):
    def __getitem__(self, index):
        X, y = super().__getitem__(index)
        return X + torch.rand(()), y


class CountingStream(IterableDataset):
    """Goes on where it was, also into the next epoch."""

    def __init__(self, cases):
        self.X, self.y = cases.make_data().tensors
        self.place = 0

    def __len__(self):
        return 44

    def __iter__(self):
        for _ in range(44 - self.place % 44):
            self.place += 1
            row = self.place * 7 % 43
            yield self.X[row], self.y[row]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Unsized(CountingStream):
    __len__ = None


class Stateless(Unsized):
    """Draws its order, and has no state."""

    state_dict = load_state_dict = None

    def __iter__(self):
        return ((self.X[row], self.y[row]) for row in torch.randperm(44))


class Counting:
    """A loader of one's own, with batches that depend on all before; it begins anew at an end."""

    def __init__(self, cases):
        self.stream = CountingStream(cases)

    def __len__(self):
        return 3

    def __iter__(self):
        for _ in range(3 - self.stream.place // 44 % 3):
            self.stream.place += 44
            rows = [(self.stream.place + one) * 7 % 43 for one in range(18)]
            yield self.stream.X[rows], self.stream.y[rows]

    def state_dict(self):
        return self.stream.state_dict()

    def load_state_dict(self, state):
        self.stream.load_state_dict(state)


WHEN = {
    "batch": {"every_n_train_steps": 3},
    "epoch": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
    "batch before a validation": {"every_n_train_steps": 3},
    "validation": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
}


def resumed_at_an_end(cases, tmp_path, loader, when, **options):
    """Return the whole training, and one that was resumed where the second epoch ends."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    def module():
        return cases.Classifier(dropout=0.3)

    validate = cases.make_loader(shuffle=False) if "validation" in when else None
    save = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **WHEN[when])
    options = {"max_epochs": 4, **options}
    whole = cases.even(1, callbacks=[save], enable_checkpointing=True, **options)
    cases.trained(whole, module(), loader(), validate=validate)
    (saved,) = tmp_path.glob(f"step={whole.global_step // 2}.ckpt")
    rest = cases.even(2, **options)
    cases.trained(rest, module(), loader(), resume=saved, validate=validate)
    return whole, rest


KINDS = ["plain", "shuffled", "generator", "workers", "stream", "unsized", "own"]
EACH_ONCE = {*zip(KINDS, itertools.cycle(WHEN), strict=False)}


@pytest.mark.parametrize(
    ("kind", "when"),
    [
        pytest.param(kind, when, marks=[pytest.mark.slow] * ((kind, when) not in EACH_ONCE))
        for kind, when in itertools.product(KINDS, WHEN)
    ],
)
@pytest.mark.thinned(2)
def test_resumed_at_an_epochs_end_with_a_loader_that_has_a_state(cases, tmp_path, kind, when):
    whole, rest = resumed_at_an_end(cases, tmp_path, lambda: with_state(cases, kind), when)
    assert (rest.global_step, rest.current_epoch) == (12, 4)
    assert_same_bits(cases.state_of(rest), cases.state_of(whole))


@pytest.mark.parametrize(
    ("kind", "step"),
    [("shuffled", 4), ("generator", 2), ("workers", 4), ("stream", 2), ("unsized", 4)],
)
@pytest.mark.thinned(2)
def test_resumed_in_the_middle_with_what_the_loader_draws(cases, tmp_path, kind, step):
    rest = resumed_at(cases, tmp_path, step, lambda: with_state(cases, kind), max_epochs=3)
    assert rest.global_step == 9


def test_a_loader_whose_state_only_counts_batches_is_refused_in_the_middle(cases, tmp_path):
    loader = lambda: with_state(cases, "stateless")  # noqa: E731
    resumed_at(cases, tmp_path, 3, loader, every=1, max_epochs=2)
    rest = cases.even(1, max_epochs=2)
    with pytest.raises(InputError, match="the data set Stateless.*state_dict.*end of an epoch"):
        cases.trained(rest, loader=loader(), resume=tmp_path / "step=2.ckpt")


@pytest.mark.parametrize("when", ["batch", "epoch"])
def test_resumed_at_the_end_of_an_epoch_that_was_cut_short(cases, tmp_path, when):
    options = {"limit_train_batches": 2}
    WHEN_SHORT = {"batch": {"every_n_train_steps": 2}, "epoch": WHEN["epoch"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WHEN, when, WHEN_SHORT[when])
        loader = lambda: with_state(cases, "shuffled")  # noqa: E731
        whole, rest = resumed_at_an_end(cases, tmp_path, loader, when, **options)
    assert rest.global_step == 8
    assert_same_bits(cases.state_of(rest), cases.state_of(whole))


@pytest.mark.parametrize(
    ("kind", "match"),
    [("shuffled", "got 0 loaders that have a state.* 1 states"), ("plain", "hold 0 .* 1: give")],
)
def test_a_loader_of_another_kind_is_refused(cases, tmp_path, kind, match):
    whole = cases.even(1, max_epochs=1)
    cases.trained(whole, loader=with_state(cases, kind))
    whole.save_checkpoint(tmp_path / "saved.ckpt")
    with pytest.raises(InputError, match=match):
        cases.trained(cases.even(1), resume=tmp_path / "saved.ckpt")


def test_a_module_that_asks_for_the_number_of_steps_resumes_in_the_middle(cases, tmp_path):
    """Lightning loads the data to count them, before it knows the place in them."""

    class Counted(cases.Classifier):
        def configure_optimizers(self):
            assert self.trainer.estimated_stepping_batches == 6
            return super().configure_optimizers()

    rest = resumed_at(cases, tmp_path, 2, lambda: with_state(cases, "shuffled"), Counted)
    assert rest.global_step == 6


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
