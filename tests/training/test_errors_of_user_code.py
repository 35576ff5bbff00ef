"""User code fails, at every place where it is called, in six ways: the error arrives as it is.

Afterwards the step is taken as a whole, or not at all, or the trainer refuses to go on by name. A
training in which the call is repeated has the bits of one that no error has disturbed.
"""

import multiprocessing
import multiprocessing.resource_sharer
import re
import threading
import traceback

import pytest
import torch
from torch.nn import CrossEntropyLoss
from torch.utils.data import DataLoader, Dataset, default_collate

from evenstep import Trainer
from evenstep.data import Loader
from evenstep.errors import CheckpointError, ClosedError
from grouping import grouped
from reference import assert_same_bits
from trainers import state_of
from user_errors import EXAMPLES, KINDS, LAYOUTS, PLACES, Bang, Callback, State, X, Y, trainer_of

ENDS = {(place, "StopIteration") for place in ("an iterator of batches", "predict's batches")}
"""It is how an iterator says that it has no more batches."""

EVERY = [
    (place, kind, layout)
    for place, one in PLACES.items()
    for kind in KINDS
    for layout in one.layouts
    if (place, kind) not in ENDS
]
OF_PLACES = {place: [case for case in EVERY if case[0] == place] for place in PLACES}
SAMPLE = [
    (*cases[number * 11 % len(cases)], 2 * (number % 2))
    for number, cases in enumerate(OF_PLACES.values())
]
"""Each place once, every kind and layout several times; half of them in the first call."""
TABLE = [(*case, 2 * (number // 3 % 2)) for number, case in enumerate(EVERY) if not number % 3]
"""A third of the layouts for each place and kind, and of these half in the first call."""


def steps(trainer, number):
    for _ in range(number):
        trainer.step(X, Y)
    trainer.waitall()


def fail(call, bang):
    """Return the error that leaves `call`."""
    bang.is_due = True
    try:
        call()
    except BaseException as error:
        return error
    finally:
        bang.is_due = False
    raise AssertionError("nothing was raised")


def assert_arrived(error, bang):
    """It is the user's own error, with the traceback from the line that raised it."""
    if bang.kind == "StopIteration" and isinstance(error, RuntimeError):
        error = error.__cause__  # so Python itself lets it leave a generator
    assert any(error is one for one in bang.raised), repr(type(error))
    assert error.args == ("enough",)
    assert traceback.extract_tb(error.__traceback__)[-1].name == "__call__"


def same(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def check(name, kind, layout, folder, before):
    """Fail behind `before` undisturbed calls, and go on.

    In the first step the contract is checked: the error of a check is left to the step. Later it
    comes once.
    """
    place, bang, quiet = PLACES[name], Bang(kind, once=before > 0), Bang(kind)
    begun = threading.active_count()
    with (
        trainer_of(layout, **place.given(bang)) as trainer,
        trainer_of(layout, **place.given(quiet)) as undisturbed,
    ):
        for _ in range(before):
            place.call(trainer, bang, folder / "before")
            place.call(undisturbed, quiet, folder / "undisturbed before")
        opening = state_of(trainer), trainer.position
        error = fail(lambda: place.call(trainer, bang, folder / "saved"), bang)
        assert_arrived(error, bang)
        said = {"half": "load the last checkpoint", "whole": "was taken"}.get(place.leaves, "")
        assert any(said in note for note in getattr(error, "__notes__", [])) or not said
        if place.leaves == "half":
            with pytest.raises(ClosedError, match=f"step {opening[1].steps_done} failed"):
                place.call(trainer, bang, folder / "saved")
            return
        if place.leaves == "nothing" and not hasattr(bang, "loader"):
            trainer.waitall()
            assert_same_bits(state_of(trainer), opening[0])
            assert trainer.position == opening[1]
            assert name == "on_save" or not [*folder.glob("saved/step-*")]
        again = None
        if place.leaves == "nothing":
            again = place.call(trainer, bang, folder / "again")
        expected = place.call(undisturbed, quiet, folder / "undisturbed")
        assert again is None or same(again, expected)
        assert trainer.position == undisturbed.position
        assert_same_bits(state_of(trainer), state_of(undisturbed))
        later = place.call(trainer, bang, folder / "later")
        assert same(later, place.call(undisturbed, quiet, folder / "undisturbed later"))
        assert_same_bits(state_of(trainer), state_of(undisturbed))
    assert threading.active_count() == begun


@pytest.mark.parametrize(("place", "kind", "layout", "before"), SAMPLE)
@pytest.mark.thinned(2)
def test_some_errors_of_user_code(place, kind, layout, before, tmp_path):
    check(place, kind, layout, tmp_path, before)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "kind", "layout", "before"), TABLE)
@pytest.mark.thinned(1, 4)
def test_every_error_of_user_code(place, kind, layout, before, tmp_path):
    check(place, kind, layout, tmp_path, before)


# ---- a trainer that is opened, closed or loaded


def each_kind_with(name, *values):
    """Have a test get each kind of error once, layouts and `values` in turn."""
    rows = [*zip(KINDS, ["two", "in flight"] * 3, (values * 6)[:6], strict=True)]
    return pytest.mark.parametrize(("kind", "layout", name), rows)


@each_kind_with("method", "open", "open", "close", "close")
def test_a_callback_that_fails_while_a_trainer_is_opened_or_closed(method, kind, layout):
    """The trainer is closed afterwards, and can be opened again."""
    bang, begun = Bang(kind), threading.active_count()
    trainer = trainer_of(layout, callbacks=[Callback(bang, method)])
    with trainer:
        steps(trainer, 1)
    if method == "open":
        assert_arrived(fail(trainer.open, bang), bang)
    else:
        trainer.open()
        steps(trainer, 1)
        assert_arrived(fail(trainer.close, bang), bang)
    assert threading.active_count() == begun
    with pytest.raises(ClosedError):
        trainer.step(X, Y)
    with trainer, trainer_of(layout) as undisturbed:
        steps(trainer, 1)
        steps(undisturbed, trainer.steps_done)
        assert_same_bits(state_of(trainer), state_of(undisturbed))


@each_kind_with("where", "state", "model", "optimizer")
def test_what_fails_while_a_checkpoint_is_loaded_changes_nothing(where, kind, layout, tmp_path):
    bang = Bang(kind)
    with trainer_of(layout, state={"a": State(bang, "load_state_dict")}) as trainer:
        steps(trainer, 2)
        trainer.save(tmp_path)
        expected = state_of(trainer)
    model, optimizer = trainer.model, trainer.optimizer
    with torch.no_grad():
        for one in model.parameters():
            one.mul_(2)
    if where == "model":
        model.register_load_state_dict_post_hook(bang)
    elif where == "optimizer":
        optimizer.register_load_state_dict_post_hook(bang)
    before = state_of(trainer)

    def load():
        options = {**LAYOUTS[layout], "state": {"a": State(bang, "load_state_dict")}}
        return Trainer.load(tmp_path, model, optimizer, CrossEntropyLoss(), **grouped(**options))

    error = fail(load, bang)
    if isinstance(error, CheckpointError):  # it names the object that can't be loaded
        error = error.__cause__
    assert_arrived(error, bang)
    assert_same_bits(state_of(trainer), before)
    with load() as again:
        assert_same_bits(state_of(again), expected)


# ---- a data set in a worker process


class Spoiled(Dataset):
    """Fails at an example of the third batch as long as a file exists."""

    def __init__(self, file, kind):
        self.file, self.kind = file, kind

    def __len__(self):
        return 2 * len(X)

    def __getitem__(self, number):
        if number == 20 and self.file.exists():
            raise KINDS[self.kind]()
        return X[number % len(X)] + number, Y[number % len(Y)]


LOADERS = {
    "evenstep's": lambda data: Loader(data, 8, shuffle=False, num_workers=1),
    "torch's": lambda data: DataLoader(data, 8, num_workers=1),
}


@each_kind_with("loader", *LOADERS, *reversed(LOADERS))
@pytest.mark.thinned(3)
def test_a_data_set_that_fails_in_a_worker_ends_the_epoch_at_a_whole_step(
    loader, kind, layout, tmp_path
):
    def train(trainer, batches):
        for batch in trainer.epoch(batches):
            trainer.step(*batch)

    file = tmp_path / "spoiled"
    batches = LOADERS[loader](Spoiled(file, kind))
    with trainer_of(layout) as trainer, trainer_of(layout) as undisturbed:
        train(undisturbed, batches)
        file.touch()
        with pytest.raises(BaseException) as caught:  # noqa: PT011 - judged below
            train(trainer, batches)
        assert re.search("enough|worker", str(caught.value)), repr(caught.value)
        trainer.waitall()
        assert trainer.steps_done <= 2  # a worker that dies is noticed at once
        file.unlink()
        train(trainer, batches)
        assert trainer.steps_done == 4
        assert_same_bits(state_of(trainer), state_of(undisturbed))
    assert not multiprocessing.active_children()


class Hanging:
    """Closes its process's socket, through which the tensors before it would be fetched."""

    def __reduce__(self):
        multiprocessing.resource_sharer.stop()
        return Hanging, ()


def hang_up(examples):
    return *default_collate(examples), Hanging()


@pytest.mark.parametrize("loader", [Loader, DataLoader])
def test_a_worker_that_ends_while_it_hands_over_a_batch_is_named(loader):
    """It is alive still: torch itself would say "No such file or directory"."""
    batches = loader(EXAMPLES, 8, shuffle=False, num_workers=1, collate_fn=hang_up)
    with trainer_of("two") as trainer:
        with pytest.raises(RuntimeError, match=f"a worker process of the {loader.__name__} ended"):
            next(iter(trainer.epoch(batches)))
        assert trainer.steps_done == 0
    assert not multiprocessing.active_children()


def test_an_error_of_a_file_that_a_sampler_reads_is_the_users_own():
    class Lost(list):
        def __iter__(self):
            with open("/no such file", encoding="utf-8") as lines:
                yield from lines

    batches = DataLoader(EXAMPLES, 8, num_workers=1, sampler=Lost(range(16)))
    with trainer_of("two") as trainer, pytest.raises(FileNotFoundError):
        next(iter(trainer.epoch(batches)))
