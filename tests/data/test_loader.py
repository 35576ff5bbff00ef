"""Batches: every example once an epoch, the same on any number of workers and after any resume."""

import multiprocessing
import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from evenstep.batch.seeds import derive_seed
from evenstep.data import Cursor, Loader, epoch_order
from evenstep.errors import DataError, InputError
from loading import Shuffled


def numbered(examples: int) -> TensorDataset:
    """Examples that carry their own number, twice."""
    return TensorDataset(torch.arange(examples), torch.arange(examples).float().reshape(-1, 1) / 2)


class Augmented(Dataset):
    """Draws from every generator that users draw from; index 13 is damaged if `damaged`."""

    def __init__(self, examples: int = 23, damaged: bool = False):
        self.examples = examples
        self.damaged = damaged

    def __len__(self):
        return self.examples

    def __getitem__(self, index):
        noise = torch.randn(2), random.random(), np.random.random()
        if self.damaged and index == 13:
            raise OSError("example 13 is damaged")
        return {"index": index, "noise": noise, "sum": torch.rand(200_000).sum()}


class Flipped(TensorDataset):
    """A subclass that computes something."""

    def __getitem__(self, index):
        return tuple(-tensor for tensor in super().__getitem__(index))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class StreamWithLength(Stream):
    def __len__(self):
        return 3


def flatten(batches) -> list[torch.Tensor]:
    """The tensors of batches of any nesting, each batch's in a fixed order."""
    tensors = []
    for batch in batches:
        if isinstance(batch, torch.Tensor):
            tensors.append(batch)
        else:
            tensors += flatten(batch.values() if isinstance(batch, dict) else batch)
    return tensors


def same(some, others) -> bool:
    some, others = flatten(some), flatten(others)
    return len(some) == len(others) and all(map(torch.equal, some, others))


def by_index(batches) -> dict[int, tuple[float, ...]]:
    """Each example's draws, under its number."""
    return {
        index: (*draws, total)
        for batch in batches
        for index, *draws, total in zip(
            batch["index"].tolist(),
            *(noise.tolist() for noise in batch["noise"][1:]),
            batch["sum"].tolist(),
            strict=True,
        )
    }


@given(
    examples=st.integers(1, 60),
    batch_size=st.integers(1, 70),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_an_epoch_visits_every_example_once_in_full_batches_but_the_last(
    examples, batch_size, seed, data
):
    loader = Loader(numbered(examples), batch_size, seed=seed)
    epoch = data.draw(st.integers(0, 5))
    batches = list(loader.epoch(Cursor(epoch, 0)))
    assert len(batches) == len(loader)
    assert all(len(batch[0]) == batch_size for batch in batches[:-1])
    assert torch.equal(torch.cat([x for x, _ in batches]), epoch_order(examples, seed, epoch))
    assert all(torch.equal(y.squeeze(1), x / 2) for x, y in batches)


@given(examples=st.integers(1, 60), batch_size=st.integers(1, 20), data=st.data())
def test_a_resumed_epoch_is_the_rest_of_the_epoch(examples, batch_size, data):
    loader = Loader(numbered(examples), batch_size)
    step = data.draw(st.integers(0, len(loader)))
    assert same(loader.epoch(Cursor(2, step)), list(loader.epoch(Cursor(2, 0)))[step:])


def test_a_loader_without_shuffling_keeps_the_order():
    loader = Loader(numbered(10), 4, shuffle=False)
    assert [x.tolist() for x, _ in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert same(loader.epoch(Cursor(7, 0)), loader)


def test_epochs_that_are_drawn_at_the_same_time_keep_their_orders():
    loader = Loader(numbered(40), 4)
    alone = [list(loader.epoch(Cursor(epoch))) for epoch in range(6)]
    begun = [loader.epoch(Cursor(epoch)) for epoch in range(6)]
    together = zip(*zip(*begun, strict=True), strict=True)
    assert all(map(same, together, alone))


def test_threads_that_share_a_loader_get_their_epochs():
    class Late(list):
        """Gives other threads time to begin another epoch."""

        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch
            time.sleep(0.01)

        def __iter__(self):
            return iter([self.epoch] * len(self))

    loader = Loader(numbered(40), 4, sampler=Late(range(8)))
    with ThreadPoolExecutor(6) as threads:
        epochs = [*threads.map(lambda epoch: [*loader.epoch(Cursor(epoch))], range(6))]
    assert [{*X.tolist()} for ((X, _), _) in epochs] == [{epoch} for epoch in range(6)]


def test_iterating_gives_epoch_0_again_and_again():
    loader = Loader(numbered(10), 4)
    first = list(loader)
    assert same(first, loader.epoch(Cursor(0, 0)))
    assert same(first, loader)
    assert loader.examples == 10


def test_a_batch_is_a_copy():
    dataset = numbered(8)
    for x, _ in Loader(dataset, 8, shuffle=False):
        x.zero_()
    assert torch.equal(dataset.tensors[0], torch.arange(8))


def test_a_subclass_of_tensor_dataset_computes_its_examples():
    dataset = Flipped(torch.arange(6))
    (batch,) = Loader(dataset, 6, shuffle=False)
    assert torch.equal(batch[0], -torch.arange(6))


def test_augmentation_is_the_same_for_any_number_of_workers():
    alone = list(Loader(Augmented(), 5).epoch(Cursor(1, 0)))
    helped = list(Loader(Augmented(), 5, num_workers=2).epoch(Cursor(1, 0)))
    assert same(alone, helped)


def test_augmentation_is_the_same_wherever_a_resume_began():
    loader = Loader(Augmented(), 5)
    whole = list(loader.epoch(Cursor(1, 0)))
    torch.manual_seed(99)
    assert same(loader.epoch(Cursor(1, 2)), whole[2:])
    assert same(Loader(Augmented(), 5, num_workers=2).epoch(Cursor(1, 2)), whole[2:])


def test_augmentation_depends_on_seed_epoch_and_index_alone():
    draws = by_index(Loader(Augmented(), 5, seed=3))
    assert by_index(Loader(Augmented(), 7, seed=3, shuffle=False)) == draws
    assert len(set(draws.values())) == len(draws) == 23
    for others in (
        by_index(Loader(Augmented(), 5, seed=4)),
        by_index(Loader(Augmented(), 5, seed=3).epoch(Cursor(1, 0))),
    ):
        assert all(others[index] != draws[index] for index in draws)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damaged", [False, True])
def test_the_global_generators_stay_where_they_are(workers, damaged):
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())

    before = states()
    loader = Loader(Augmented(damaged=damaged), 5, num_workers=workers)
    if damaged:
        with pytest.raises(OSError, match="example 13 is damaged"):
            list(loader)
    else:
        list(loader)
    assert states() == before


def test_an_abandoned_epoch_leaves_no_worker_behind():
    batches = Loader(Augmented(), 5, num_workers=2).epoch(Cursor())
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    batches.close()
    assert multiprocessing.active_children() == []


def test_a_damaged_example_leaves_no_worker_behind():
    with pytest.raises(OSError, match="example 13 is damaged") as caught:
        list(Loader(Augmented(damaged=True), 5, num_workers=2))
    assert caught.tb is not None  # it holds on to the frames that were left
    assert multiprocessing.active_children() == []


def test_nothing_starts_before_the_first_batch_is_asked_for():
    batches = Loader(Augmented(), 5, num_workers=2).epoch(Cursor())
    assert multiprocessing.active_children() == []
    batches.close()


@pytest.mark.parametrize("dataset", [numbered(10), Augmented(10)])
def test_the_end_of_an_epoch_has_no_batches(dataset):
    assert list(Loader(dataset, 4).epoch(Cursor(0, 3))) == []


def test_a_place_beyond_the_epoch_is_refused_at_once():
    with pytest.raises(InputError, match=r"step=4.* 3 batches \(10 examples, 4 a batch\)"):
        Loader(numbered(10), 4).epoch(Cursor(0, 4))


@pytest.mark.parametrize("dataset", [Stream(), StreamWithLength(), Dataset()])
def test_a_data_set_without_numbers_is_refused(dataset):
    with pytest.raises(DataError, match=r"iterate it yourself and call trainer\.step"):
        Loader(dataset, 4)


@given(examples=st.integers(1, 40), batch_size=st.integers(1, 9))
def test_the_short_last_batch_can_be_left_out(examples, batch_size):
    dataset = TensorDataset(torch.arange(examples))
    whole = list(Loader(dataset, batch_size).epoch(Cursor()))
    loader = Loader(dataset, batch_size, drop_last=True)
    dropped = list(loader.epoch(Cursor()))
    assert len(loader) == len(dropped) == examples // batch_size
    assert all(len(batch) == batch_size for (batch,) in dropped)
    for (got,), (wanted,) in zip(dropped, whole, strict=False):
        assert torch.equal(got, wanted)


# Torch's names, and samplers


def test_the_arguments_have_torchs_names_only():
    loader = Loader(Augmented(), 5, num_workers=2, collate_fn=len)
    assert (loader.num_workers, loader.collate_fn) == (2, len)
    assert sum(Loader(Augmented(), 5, collate_fn=len)) == 23
    for old in ("workers", "collate"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{old}'"):
            Loader(Augmented(), 5, **{old: None})


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"num_workers": -1}, "num_workers=-1: give an integer from 0"),
        ({"batch_size": 0}, "batch_size=0: give an integer from 1"),
        ({"dataset": numbered(0)}, "0 examples: at least 1"),
        ({"dataset": Augmented(0)}, "0 examples: at least 1"),
        ({"sampler": 3}, "got sampler=3: give an iterable of numbers that has a length"),
        ({"sampler": iter([1])}, "got sampler=.*: give an iterable of numbers that has a length"),
        ({"sampler": []}, "list gives 0 examples: at least 1"),
        (
            {"sampler": DistributedSampler(range(9), 2, 0)},
            "got sampler=DistributedSampler for 2 processes: .* use shuffle=True instead",
        ),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, line):
    with pytest.raises((InputError, DataError), match=line):
        Loader(**{"dataset": numbered(9), "batch_size": 2, **arguments})


def test_a_sampler_gives_the_order():
    loader = Loader(numbered(10), 4, sampler=[3, 3, 9, 0, 5])
    assert [x.tolist() for x, _ in loader] == [[3, 3, 9, 0], [5]]
    assert (len(loader), loader.examples) == (2, 5)


@pytest.mark.parametrize("kind", ["weighted", "python"])
def test_a_random_sampler_follows_from_seed_and_epoch(kind):
    def loader(seed=0):
        weights = torch.linspace(1, 4, 23)
        sampler = WeightedRandomSampler(weights, 30) if kind == "weighted" else Shuffled()
        return Loader(numbered(46), 4, seed=seed, sampler=sampler)

    whole = list(loader().epoch(Cursor(1)))
    random.seed(3)
    torch.manual_seed(3)
    states = torch.get_rng_state().tolist(), random.getstate()
    assert same(loader().epoch(Cursor(1, 2)), whole[2:])
    assert (torch.get_rng_state().tolist(), random.getstate()) == states
    assert not same(loader().epoch(Cursor(0)), whole)
    assert not same(loader(seed=1).epoch(Cursor(1)), whole)


def test_a_sampler_of_another_length_than_it_says_is_refused():
    class Lying(list):
        def __len__(self):
            return 4

    with pytest.raises(InputError, match="Lying gave 3 examples in epoch 0, but its length is 4"):
        list(Loader(numbered(9), 2, sampler=Lying([1, 2, 3])))


def mixed(examples):
    return torch.rand(len(examples))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_draws_numbers_of_its_own_for_each_batch_of_each_epoch(workers):
    loader = Loader(numbered(12), 4, seed=3, num_workers=workers, collate_fn=mixed)
    for epoch in range(2):
        for step, found in enumerate(loader.epoch(Cursor(epoch, 1)), 1):
            seed = derive_seed("collate", 3, epoch, step)
            assert found.equal(torch.rand(4, generator=torch.Generator().manual_seed(seed)))
