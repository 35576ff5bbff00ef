"""Data sets that hold generators, and what draws from generators that nobody can find."""

import multiprocessing
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from evenstep.batch import Part, shard_bounds
from evenstep.data import Cursor, Loader
from evenstep.data.adapters.map_style import MapStyle
from evenstep.errors import InputError

EXAMPLES, BATCH = 30, 7
KINDS = ["torch", "numpy", "numpy's old", "python"]


def generator_of(kind):
    """Return a generator in some state, and a function that draws a number from it."""
    if kind == "torch":
        return torch.Generator(), draw_by_torch
    if kind == "python":
        return random.Random(), random.Random.random
    one = np.random.default_rng() if kind == "numpy" else np.random.RandomState()
    return one, draw_by_numpy


def draw_by_torch(one):
    return torch.rand((), generator=one)


def draw_by_numpy(one):
    return one.random()


class SavedPlace(Dataset):
    """Draws from a generator in an attribute."""

    def __init__(self, kind):
        self.generator, self.draw = generator_of(kind)

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        return index, float(self.draw(self.generator))


class InSlots(Dataset):
    """Draws from a generator in a slot with a private name."""

    __slots__ = ("__generator", "draw", "never_set")

    def __init__(self, kind):
        self.__generator, self.draw = generator_of(kind)

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        return index, float(self.draw(self.__generator))


class Transformed(Dataset):
    """Draws from a generator inside a transform, which has slots and a dictionary."""

    class Transform:
        __slots__ = ("__dict__", "inner")

    def __init__(self, kind):
        self.transform = self.Transform()
        self.transform.inner = [SavedPlace(kind)]

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        return self.transform.inner[0][index]


DATASETS = {
    "held": SavedPlace,
    "slots": InSlots,
    "transform": Transformed,
    "subset": lambda kind: Subset(SavedPlace(kind), range(EXAMPLES)),
}


def batches_of(loader, cursor=Cursor(1, 0), part=None):  # noqa: B008
    """Return what a loader gives in an epoch, with the seed 5."""
    if isinstance(loader, Loader):
        return [*loader.epoch(cursor, part)]
    source = MapStyle(loader, 5)
    source.open(cursor, None)
    found = [*source.batches(part)]
    source.close()
    return found


def own(dataset, workers=0, **options):
    return Loader(dataset, BATCH, seed=5, num_workers=workers, **options)


def torchs(dataset, workers=0, **options):
    return DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, **options)


def are_equal(some, others):
    return len(some) == len(others) and all(
        torch.equal(a, b)
        for one, other in zip(some, others, strict=True)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [own, torchs])
@pytest.mark.thinned(3)
def test_the_workers_and_a_resume_change_nothing(make, kind, name):
    whole = batches_of(make(DATASETS[name](kind)))
    drawn = torch.cat([noise for _, noise in whole])
    assert len(drawn.unique()) == EXAMPLES
    assert are_equal(batches_of(make(DATASETS[name](kind)), Cursor(1, 2)), whole[2:])
    if kind in ("torch", "numpy"):
        assert are_equal(batches_of(make(DATASETS[name](kind), workers=2)), whole)


@pytest.fixture
def forkserver():
    """Python's default since 3.14, where nothing is inherited."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("forkserver")
def test_workers_that_are_not_forked_get_torchs_generators():
    whole = batches_of(own(SavedPlace("torch")))
    assert are_equal(batches_of(own(SavedPlace("torch"), workers=2)), whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [own, torchs])
def test_two_processes_draw_what_one_draws(make, kind):
    def part_of(rank):
        return lambda _, examples: Part(
            examples, shard_bounds(examples, 4), (range(1), range(1, min(4, examples))), rank
        )

    whole = batches_of(make(SavedPlace(kind)))
    parts = [batches_of(make(SavedPlace(kind)), part=part_of(rank)) for rank in (0, 1)]
    joined = [
        [torch.cat(rows) for rows in zip(*batches, strict=True)]
        for batches in zip(*parts, strict=True)
    ]
    assert are_equal(joined, whole)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [own, torchs])
def test_a_process_without_examples_gets_batches_of_length_0(make, workers):
    def part(number, examples):  # of every second batch, the other process has all shards
        runs = (range(2), range(2, 2)) if number % 2 else (range(1), range(1, 2))
        return Part(examples, shard_bounds(examples, 2), runs, 1)

    batches = batches_of(make(Plain(), workers=workers), part=part)
    assert [len(X) for X, _ in batches] == [len(y) for _, y in batches] == [3, 0, 3, 0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_held_generator_stays_where_it_is(kind):
    held, untouched = SavedPlace(kind), SavedPlace(kind)
    if kind == "python":
        untouched.generator.setstate(held.generator.getstate())
    elif kind == "torch":
        untouched.generator.set_state(held.generator.get_state())
    else:
        bits = "bit_generator" if kind == "numpy" else "_bit_generator"
        getattr(untouched.generator, bits).state = getattr(held.generator, bits).state
    batches_of(own(held))
    assert held.draw(held.generator) == untouched.draw(untouched.generator)


def test_an_epoch_has_other_draws_than_the_one_before():
    loader = own(SavedPlace("torch"))
    first, second = (
        dict(
            zip(*map(torch.Tensor.tolist, map(torch.cat, zip(*batches, strict=True))), strict=True)
        )
        for batches in (batches_of(loader, Cursor(epoch, 0)) for epoch in (0, 1))
    )
    assert first.keys() == second.keys()
    assert all(first[index] != second[index] for index in first)


AT_MODULE_LEVEL = np.random.default_rng(0)
PYTHONS = random.Random(0)


class FromModule(Dataset):
    def __init__(self, examples=EXAMPLES):
        self.examples = examples
        self.fetched = []

    def __len__(self):
        return self.examples

    def __getitem__(self, index):
        self.fetched.append(index)
        return index, AT_MODULE_LEVEL.random()


class Arrays(FromModule):
    def __getitem__(self, index):
        return {"image": AT_MODULE_LEVEL.random(3), "label": index}


class InTime(FromModule):
    def __getitem__(self, index):
        return index, PYTHONS.random()


class Lazy(FromModule):
    """Makes its generator when it is first used."""

    generator = None

    def __getitem__(self, index):
        if self.generator is None:
            self.generator = np.random.default_rng()
        return index, self.generator.random()


class InPlace(FromModule):
    """Adds noise to what it holds."""

    def __init__(self):
        super().__init__()
        self.X = torch.zeros(EXAMPLES, 2)

    def __getitem__(self, index):
        return self.X[index].add_(torch.rand(2))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [FromModule, Arrays, InTime, Lazy, InPlace])
@pytest.mark.parametrize("make", [own, torchs])
@pytest.mark.thinned(2)
def test_a_generator_that_can_t_be_seeded_is_refused_by_name(make, dataset, workers):
    with pytest.raises(InputError, match=rf"{dataset.__name__}.*epoch 1.*generator"):
        batches_of(make(dataset(), workers=workers))


class Counted(FromModule):
    def __getitem__(self, index):
        self.fetched.append(index)
        return index, torch.rand(()), float("nan"), "text", object()

    @staticmethod
    def collate(examples):
        return default_collate([example[:4] for example in examples])


@pytest.mark.parametrize("make", [own, torchs])
def test_only_the_first_batch_of_a_training_is_fetched_twice(make):
    dataset = Counted()
    loader = make(dataset, collate_fn=Counted.collate)
    source = loader if isinstance(loader, Loader) else MapStyle(loader, 5)
    fetched = []
    for epoch in range(3):
        if isinstance(source, MapStyle):
            source.open(Cursor(epoch), None)
        before = len(dataset.fetched)
        found = source.epoch(Cursor(epoch)) if source is loader else source.batches(None)
        assert len([*found]) == 5
        fetched.append(len(dataset.fetched) - before)
    usual = EXAMPLES + (BATCH if make is torchs else 0)  # which finds so that a data set draws
    assert fetched == [usual + BATCH, usual, usual]


def noisy(examples):
    X, y = default_collate(examples)
    return X + torch.rand(()) + random.random(), y


class Plain(FromModule):
    def __getitem__(self, index):
        return torch.tensor(float(index)), index


def test_what_a_collate_draws_follows_from_the_seed_too():
    before = torch.get_rng_state(), random.getstate()
    whole = batches_of(own(Plain(), collate_fn=noisy))
    assert torch.equal(before[0], torch.get_rng_state())
    assert random.getstate() == before[1]
    assert are_equal(batches_of(own(Plain(), collate_fn=noisy, workers=2)), whole)
    assert are_equal(batches_of(own(Plain(), collate_fn=noisy), Cursor(1, 2)), whole[2:])


def test_a_collate_that_draws_for_a_part_of_a_batch_is_refused():
    part = Part(BATCH, shard_bounds(BATCH, 2), (range(1), range(1, 2)), 0)
    with pytest.raises(InputError, match="noisy.*part of a batch.*DataLoader"):
        batches_of(own(Plain(), collate_fn=noisy), part=lambda *_: part)
    quiet = batches_of(own(Plain(), collate_fn=default_collate), part=lambda *_: part)
    assert len(quiet[0][0]) == 4


def test_rows_of_tensors_are_compared_with_nothing():
    assert len(batches_of(own(TensorDataset(torch.arange(EXAMPLES))))) == 5
