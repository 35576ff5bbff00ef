"""The place in the data: which batches `Trainer.epoch` yields, whatever the loop does with them."""

import contextlib
import functools
import json

import pytest
import torch
from torch import nn

import evenstep
from evenstep.batch.seeds import shard_seed
from evenstep.data import Cursor, Loader
from evenstep.errors import NonFiniteLossError
from trainers import open_trainer, sgd
from zoo import CLASSES

EXAMPLES, BATCH = 42, 4  # 11 batches an epoch, the last of 2
BAD = 3  # the batch that gives NaN


def dropping():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, CLASSES))


def loader(bad=False):
    torch.manual_seed(1)
    X, y = torch.randn(EXAMPLES, 3), torch.randint(CLASSES, (EXAMPLES,))
    number = torch.arange(EXAMPLES) // BATCH
    if bad:
        X[number == BAD] = torch.nan
    return Loader(torch.utils.data.TensorDataset(X, y, number), BATCH, shuffle=False)


class Loop:
    """A training loop that does something else than a step for each batch.

    Attributes:
        stepped: the batches that a step was taken on, in order.
    """

    def __init__(self, kind, max_in_flight):
        self.kind = kind
        self.options = {"devices": 2, "max_in_flight": max_in_flight, "shards": 2}
        self.stepped = []

    def new(self):
        return open_trainer(dropping(), **self.options)

    def load(self, folder):
        model = dropping()
        options = {"devices": 1, "max_in_flight": self.options["max_in_flight"]}
        return evenstep.Trainer.load(folder, model, sgd(model), nn.CrossEntropyLoss(), **options)

    def run(self, trainer, until):
        """Train until `until` batches of all epochs were drawn."""
        with trainer:
            while True:
                for X, y, number in trainer.epoch(loader(bad=self.kind == "NonFiniteLossError")):
                    self.body(trainer, X, y, int(number[0]))
                    if 11 * trainer.cursor.epoch + int(number[0]) + 1 == until:
                        trainer.waitall()
                        return trainer

    def body(self, trainer, X, y, number):
        if self.kind == "continue" and number % 3 == 1:
            return
        with contextlib.suppress(NonFiniteLossError):
            for _ in range(2 if self.kind == "two steps" else 1):
                loss = trainer.step(X, y)
                if self.kind == "NonFiniteLossError":
                    loss.wait_to_read()
                self.stepped.append(number)


KINDS = ["each", "continue", "NonFiniteLossError", "two steps"]


@functools.cache
def unbroken(kind):
    """Return the batches with a step of a loop that is not broken off, and its trainer."""
    whole = Loop(kind, 1)
    return whole.stepped, whole.run(whole.new(), until=17)


@pytest.mark.parametrize(
    ("kind", "stop", "max_in_flight"),
    [
        (kind, stop, 1 + (number + place) % 2)
        for number, kind in enumerate(KINDS)
        for place, stop in enumerate([1, 4, 5, 11, 14])
    ],
)
@pytest.mark.thinned(2)
def test_a_loop_resumes_behind_the_batches_that_it_drew(tmp_path, kind, stop, max_in_flight):
    stepped, whole = unbroken(kind)
    halves = Loop(kind, max_in_flight)
    halves.run(halves.new(), until=stop).save(tmp_path)
    resumed = halves.run(halves.load(tmp_path), until=17)
    assert halves.stepped == stepped
    assert resumed.cursor == whole.cursor
    assert resumed.fingerprint() == whole.fingerprint()


def drawn_batches(trainer, count=None):
    """Draw batches without a step; return their numbers."""
    drawn = []
    for _, _, number in trainer.epoch(loader()):
        drawn.append(int(number[0]))
        if len(drawn) == count:
            break
    return drawn


@pytest.fixture
def trainer():
    with Loop("each", 1).new() as opened:
        yield opened


def test_the_batch_in_hand_is_yielded_again_until_a_step_takes_it(trainer):
    """A loop that stops, or saves, before its step does not lose the batch."""
    for _, _, number in trainer.epoch(loader()):
        assert trainer.cursor == Cursor(0, number[0])
        if number[0] == 2:
            break
    assert drawn_batches(trainer, count=3) == [2, 3, 4]
    assert trainer.cursor == Cursor(0, 4)


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_step_broken_off_by_ctrl_c_is_taken_again_on_its_batch(tmp_path, max_in_flight):
    loop, updates = Loop("each", max_in_flight), []

    def interrupted(module):
        updates.append(module)
        if len(updates) == 5:
            raise KeyboardInterrupt

    whole = Loop("each", 1)
    unbroken = whole.run(whole.new(), until=11)
    loop.options["before_update"] = interrupted
    with contextlib.suppress(KeyboardInterrupt):
        trainer = loop.new()
        loop.run(trainer, until=11)
    trainer.save(tmp_path)
    assert trainer.cursor.step == trainer.steps_done == 4
    resumed = loop.run(loop.load(tmp_path), until=11)
    assert resumed.fingerprint() == unbroken.fingerprint()


def test_an_epoch_that_is_skipped_as_a_whole_ends(trainer):
    assert drawn_batches(trainer) == [*range(11)]
    assert trainer.cursor == Cursor(1, 0)
    assert trainer.steps_done == 0


def test_steps_on_batches_of_ones_own_before_an_epoch_skip_nothing_of_it(trainer):
    X, y, _ = next(iter(loader()))
    trainer.step(X, y)
    assert drawn_batches(trainer, count=2) == [0, 1]


def test_two_epochs_side_by_side_count_each_batch_once(trainer):
    for (X, y, first), (_, _, second) in zip(
        trainer.epoch(loader()), trainer.epoch(loader()), strict=True
    ):
        assert first.equal(second)
        trainer.step(X, y)
    assert trainer.cursor == Cursor(1, 0)
    assert trainer.steps_done == 11


def test_a_loader_of_ones_own_counts_steps(tmp_path, trainer):
    for X, y, _ in [*loader()][:3]:
        trainer.step(X, y)
    assert trainer.cursor == Cursor(0, 3)
    trainer.save(tmp_path)
    assert Loop("each", 1).load(tmp_path).cursor == Cursor(0, 3)


def state_saved_by(trainer, folder):
    return json.loads((trainer.save(folder) / "manifest.json").read_text())["state"]


def test_a_checkpoint_names_the_seeds_place_only_where_it_is_another(tmp_path):
    plain, skipping = Loop("each", 1), Loop("continue", 1)
    state = state_saved_by(plain.run(plain.new(), until=5), tmp_path / "plain")
    assert state["cursor"] == {"epoch": 0, "step": 5}
    assert "seeds_at" not in state
    state = state_saved_by(skipping.run(skipping.new(), until=6), tmp_path / "skipping")
    assert state["cursor"] == {"epoch": 0, "step": 6}
    assert state["seeds_at"] == {"epoch": 0, "step": 4}


def test_what_a_step_draws_follows_from_its_epoch_and_its_place_in_it():
    """Each shard draws as after `torch.manual_seed` with the seed of its epoch, step and number."""

    def objective(model, X, y, number):
        drawn = torch.rand(len(y))
        return nn.functional.cross_entropy(model(X), y, reduction="sum"), len(y), {"drawn": drawn}

    model, data, seed = nn.Linear(3, CLASSES), loader(), 5
    with open_trainer(model, objective=objective, shards=2, seed=seed) as trainer:
        for epoch in range(2):
            for step, batch in enumerate(trainer.epoch(data)):
                found = trainer.step(*batch).outputs["drawn"]
                shards = torch.tensor_split(batch[1], 2)
                for number, (drawn, part) in enumerate(
                    zip(found.split([*map(len, shards)]), shards, strict=True)
                ):
                    own = torch.Generator().manual_seed(shard_seed(seed, epoch, step, number))
                    assert drawn.equal(torch.rand(len(part), generator=own))
