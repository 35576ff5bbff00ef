"""Loaders that people have already: the same order on any devices, and after any resume."""

import functools
import itertools
import logging
import multiprocessing
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import evenstep
import loading
from evenstep.data import Cursor
from evenstep.data.fetching import COMPARED
from evenstep.errors import BatchError, CheckpointError, InputError
from loading import BATCH, BATCHES, CLASSES, EXAMPLES, FEATURES, KINDS, PROCESSES, arguments_of
from trainers import open_trainer, sgd

SLOW = {"forkserver", "spawn", "torchdata stream fork", "stream persistent"}
FEW = ("shuffled", "augmented", "stream", "own state")


def kinds(names=KINDS):
    return [
        pytest.param(name, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in names
    ]


def loader_of(kind):
    if "torchdata" in kind:
        pytest.importorskip("torchdata", reason="torchdata is not installed")
    if "datasets" in kind:
        pytest.importorskip("datasets", reason="Hugging Face's datasets are not installed")
    return KINDS[kind]()


SEEDS = itertools.count(1)


def disturb():
    """Leave the default generators in another state each time, as other scripts would have."""
    seed = next(SEEDS)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.3), nn.Linear(8, CLASSES))


def new(devices=1, **options):
    module = model()
    options = {"shards": 2, "devices": devices, **options}
    disturb()
    return evenstep.Trainer(module, sgd(module), nn.CrossEntropyLoss(), **options)


def load(folder, devices=1, **options):
    module = model()
    options = {"devices": devices, **options}
    disturb()
    return evenstep.Trainer.load(folder, module, sgd(module), nn.CrossEntropyLoss(), **options)


def train(trainer, loader, epochs=2, until=None):
    """Train up to an epoch's end, or up to a number of steps; return the inputs of the batches."""
    seen = []
    with trainer:
        while trainer.cursor.epoch < epochs:
            for batch in trainer.epoch(loader):
                X, y = arguments_of(batch)
                seen.append(X.clone())
                trainer.step(X, y)
                if trainer.steps_done == until:
                    trainer.waitall()
                    return seen
    return seen


@functools.cache
def unbroken(kind):
    """Return the batches of two epochs on one device, and the trainer that was trained on them."""
    trainer = new()
    return train(trainer, loader_of(kind)), trainer


def same(some, others):
    return len(some) == len(others) and all(map(torch.equal, some, others))


@pytest.fixture(autouse=True)
def no_worker_is_left():
    yield
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.thinned(8)
def test_a_training_resumes_in_the_middle_of_an_epoch(tmp_path, kind):
    whole, straight = unbroken(kind)
    stop = len(whole) // 2 + 3
    interrupted = new(devices=2)
    before = train(interrupted, loader_of(kind), until=stop)
    interrupted.save(tmp_path)
    assert 0 < interrupted.cursor.step < BATCHES
    resumed = load(tmp_path, devices=3)
    after = train(resumed, loader_of(kind))
    assert same(before + after, whole)
    assert resumed.fingerprint() == straight.fingerprint()
    assert resumed.cursor == straight.cursor == Cursor(2)


@pytest.mark.parametrize("kind", kinds(sorted(set(KINDS) - PROCESSES)))
@pytest.mark.thinned(8)
def test_a_training_resumes_twice_in_one_epoch_and_at_its_end(tmp_path, kind):
    trainer, seen = new(), []
    for epochs, more in ((1, BATCHES + 1), (2, 5), (2, 1)):  # an epoch has at most 12
        seen += train(trainer, loader_of(kind), epochs, until=len(seen) + more)
        assert len(seen) == trainer.steps_done
        trainer.save(tmp_path / str(len(seen)))
        trainer = load(tmp_path / str(len(seen)))
    assert same(seen + train(trainer, loader_of(kind)), unbroken(kind)[0])


SPAWNED = {"forkserver", "spawn"}
IN_ORDER = {"in order", "list", "datasets itself", "datasets stream"}


@pytest.mark.parametrize("kind", kinds(sorted(set(KINDS) - IN_ORDER - SPAWNED)))
@pytest.mark.thinned(5)
def test_the_epochs_have_different_orders(kind):
    whole, _ = unbroken(kind)
    half = len(whole) // 2
    assert not torch.equal(torch.cat(whole[:half]), torch.cat(whole[half:]))


@pytest.mark.parametrize("kind", kinds(FEW))
def test_another_seed_is_another_order(kind):
    assert not same(unbroken(kind)[0], train(new(seed=1), loader_of(kind)))


@pytest.mark.parametrize("kind", kinds(FEW))
def test_the_default_generators_stay_where_they_are(kind):
    def states():
        return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())

    loader = loader_of(kind)
    trainer = new()
    before = states()
    train(trainer, loader)
    assert states() == before


@pytest.mark.parametrize("kind", kinds(["augmented", "in lists", "collate_fn", "weighted"]))
@pytest.mark.thinned(2)
def test_the_number_of_workers_changes_nothing(kind):
    alone = loader_of(kind)
    helped = DataLoader(
        alone.dataset,
        batch_sampler=alone.batch_sampler,
        collate_fn=alone.collate_fn,
        num_workers=2,
        multiprocessing_context="fork",
    )
    assert same(unbroken(kind)[0], train(new(), helped))


def test_an_example_that_is_drawn_twice_is_augmented_anew():
    sampler = [5] * 8
    (batch,) = train(new(), DataLoader(loading.Augmented(), 8, sampler=sampler), epochs=1)
    assert len({tuple(row) for row in batch.tolist()}) == 8


def test_steps_in_flight_change_nothing():
    for kind in ("augmented", "stream"):
        two = new(devices=2, max_in_flight=2)
        train(two, loader_of(kind))
        assert two.fingerprint() == unbroken(kind)[1].fingerprint()


def test_an_epoch_yields_what_the_loader_yields():
    trainer = new()
    with trainer:
        assert isinstance(next(trainer.epoch(DataLoader(plain_inputs(), 4))), torch.Tensor)
        assert isinstance(next(trainer.epoch(loader_of("shuffled"))), list)
        assert isinstance(next(trainer.epoch(loader_of("list"))), tuple)
        assert isinstance(next(trainer.epoch(loader_of("generators"))), dict)


def plain_inputs():
    return [*loading.tensors()[0]]


@pytest.mark.parametrize("kind", kinds(["shuffled", "stream", "list", "own state", "persistent"]))
def test_a_loop_that_breaks_off_continues_behind_its_last_step(kind):
    trainer, seen = new(), []
    loader = loader_of(kind)
    with trainer:
        for stop in (3, 7, 13, 1000):
            while trainer.cursor.epoch < 2:
                for batch in trainer.epoch(loader):
                    X, y = arguments_of(batch)
                    if trainer.steps_done == stop:
                        break  # this batch has no step, and is drawn again
                    seen.append(X.clone())
                    trainer.step(X, y)
                if trainer.steps_done == stop:
                    break
    assert same(seen, unbroken(kind)[0])


def test_batches_before_the_place_are_not_fetched_again(tmp_path):
    first = new()
    train(first, DataLoader(loading.Quiet(), BATCH, shuffle=True), until=9)
    first.save(tmp_path)
    dataset = loading.Quiet()
    train(load(tmp_path), DataLoader(dataset, BATCH, shuffle=True), until=12)
    again = 4 + 2 * COMPARED  # the first batch, and the examples that are compared
    assert len(dataset.fetched) - again == 10  # two batches of four, and the last


def test_a_loader_with_a_state_draws_nothing_twice(tmp_path):
    first = new()
    train(first, loading.StatefulBatches(), until=9)
    first.save(tmp_path)
    loader = loading.StatefulBatches()
    train(load(tmp_path), loader, until=12)
    assert loader.made == 3


def test_a_save_before_the_step_of_a_batch_resumes_with_that_batch(tmp_path):
    whole = train(new(), loading.StatefulBatches())
    trainer = new()
    with trainer:
        for X, y in trainer.epoch(loading.StatefulBatches()):
            if trainer.steps_done == 5:
                trainer.save(tmp_path)
                break
            trainer.step(X, y)
    assert same(train(load(tmp_path), loading.StatefulBatches()), whole[5:])


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("shuffled", "5 batches drawn from the sampler, and not fetched"),
        ("stream", "5 batches drawn and dropped"),
        ("own state", "its own state of batch 5, and 0 batches drawn and dropped"),
    ],
    ids=str,
)
def test_a_line_says_how_long_the_way_back_took(tmp_path, caplog, kind, how):
    first = new()
    train(first, loader_of(kind), until=5)
    first.save(tmp_path)
    caplog.set_level(logging.INFO, "evenstep")
    train(load(tmp_path), loader_of(kind), until=6)
    (line,) = [text for text in caplog.messages if "back at" in text]
    assert "back at batch 5 of epoch 0 after 0." in line
    assert how in line


def test_an_iterator_is_an_epoch(tmp_path):
    def batches():
        yield from loader_of("list")

    whole = train(new(), loader_of("list"), epochs=1)
    assert same(train(new(), batches(), epochs=1), whole)
    first = new()
    before = train(first, batches(), until=5)
    first.save(tmp_path)
    assert same(before + train(load(tmp_path), batches(), epochs=1), whole)


def test_an_iterator_goes_on_after_a_break():
    whole = train(new(), loader_of("list"), epochs=1)
    batches, seen = iter(loader_of("list")), []
    with new() as trainer:
        for stop in (3, 1000):
            for X, y in trainer.epoch(batches):
                if trainer.steps_done == stop:
                    break
                seen.append(X.clone())
                trainer.step(X, y)
    assert same(seen, whole)


# Bad input


def draw(loader, **options):
    with new(**options) as trainer:
        for _ in trainer.epoch(loader):
            pass
        for _ in trainer.epoch(loader):
            pass


PLAIN = loading.plain()
REFUSED = [
    (list, "list gave no batch in epoch 0"),
    (lambda: DataLoader(PLAIN, 100, drop_last=True), "no batch in epoch 0.*with drop_last=True"),
    (lambda: iter(loader_of("list")), "is an iterator, and was exhausted in epoch 0: give a l"),
    (
        lambda: DataLoader(PLAIN, 4, sampler=loading.Unseeded()),
        "the sampler of the DataLoader, Unseeded in BatchSampler, gave two orders for epoch 0",
    ),
    (
        lambda: DataLoader(PLAIN, 4, sampler=DistributedSampler(range(EXAMPLES), 2, 0)),
        "has a DistributedSampler for 2 processes: evenstep cuts each batch for the processes",
    ),
    (lambda: DataLoader(loading.Stream(), 4, num_workers=1, in_order=False), "has in_order=False"),
    (loading.plain, "got the data set TensorDataset, which gives examples"),
    (lambda: loader_of, "got <function loader_of at .* as a loader: call it"),
    (lambda: "batches", "got 'batches' as a loader: give an iterable of batches"),
    (lambda: 3, "got 3 as a loader"),
]


@pytest.mark.parametrize(("loader", "line"), REFUSED)
def test_a_loader_that_is_none_is_refused_in_one_line(loader, line):
    with pytest.raises(InputError, match=line) as caught:
        draw(loader())
    assert "\n" not in str(caught.value)


def test_a_data_set_that_was_split_by_node_is_refused():
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets are not installed")
    from datasets.distributed import split_dataset_by_node

    stream = datasets.Dataset.from_dict({"a": [*range(8)]}).to_iterable_dataset()
    stream = split_dataset_by_node(stream, rank=0, world_size=2)
    with pytest.raises(InputError, match="was split by node for 2 processes"):
        draw(DataLoader(stream, 2))


def test_another_length_is_noted(caplog):
    class Shrinking:
        length = 4

        def __iter__(self):
            self.length -= 1
            return iter(loader_of("list")[: self.length])

    draw(Shrinking())
    (line,) = [text for text in caplog.messages if "Shrinking" in text]
    assert "Shrinking gave 2 batches in epoch 1, and 3 in the epoch before" in line


def test_a_batch_that_cannot_be_cut_is_named_and_stays_in_hand():
    with new() as trainer:
        batch = next(trainer.epoch([(torch.ones(4, 3), torch.ones(3))]))
        with pytest.raises(BatchError, match="same number of examples"):
            trainer.step(*batch)
        assert trainer.cursor == Cursor(0, 0)


def broken_off(folder, loader):
    trainer = new()
    train(trainer, loader, until=5)
    trainer.save(folder)
    return load(folder)


def test_a_state_that_the_loader_does_not_take_is_named(tmp_path):
    class Forgetful(loading.StatefulBatches):
        def load_state_dict(self, state):
            raise KeyError("place")

    resumed = broken_off(tmp_path, Forgetful())
    with pytest.raises(CheckpointError, match=r"Forgetful could not load the state.*KeyError: 'pl"):
        train(resumed, Forgetful())
    assert resumed.cursor == Cursor(0, 5)


def shortened(now):
    dataset = TensorDataset(*(one[: EXAMPLES - now] for one in loading.tensors()))
    return DataLoader(dataset, BATCH, shuffle=True)


@pytest.mark.parametrize(
    ("loader", "error"),
    [
        (shortened, CheckpointError),
        (lambda now: [(X + now, y) for X, y in KINDS["list"]()], CheckpointError),
        (lambda now: DataLoader(loading.plain(), BATCH * (1 + 4 * now)), InputError),
        (lambda now: KINDS["list"]()[: 12 - 9 * now], InputError),
    ],
    ids=["another order", "another stream", "fewer batches", "fewer in a stream"],
)
def test_other_data_than_before_are_refused(tmp_path, loader, error):
    resumed = broken_off(tmp_path, loader(0))
    with pytest.raises(error, match="training (that was saved|is at batch 5|started with)"):
        train(resumed, loader(1))
    assert same(train(resumed, loader(0)), train(new(), loader(0))[5:])


def numbered(epoch):
    """Return the batches of an epoch in an order that follows from its number."""
    order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(epoch))
    X, y = loading.tensors()
    return [(X[some], y[some]) for some in order.split(BATCH)]


class CountsEpochs:
    """Says where it is in an epoch; the epoch is counted where it is iterated."""

    def __init__(self):
        self.epoch, self.place = -1, 0

    def __iter__(self):
        if not self.place:
            self.epoch += 1
        return self.rest()

    def rest(self):
        batches = numbered(self.epoch)
        while self.place < len(batches):
            self.place += 1
            yield batches[self.place - 1]
        self.place = 0

    def state_dict(self):
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state):
        self.epoch, self.place = state["epoch"], state["place"]


class SaysTheEpoch(CountsEpochs):
    """Begins its epoch anew, wherever it was."""

    def rest(self):
        return iter(numbered(self.epoch))

    def state_dict(self):
        return {"epoch": self.epoch}

    def load_state_dict(self, state):
        self.epoch = state["epoch"]


@pytest.mark.parametrize("kind", [CountsEpochs, SaysTheEpoch])
@pytest.mark.parametrize("stop", [1, 5, BATCHES, BATCHES + 5, None])
def test_a_state_that_counts_epochs_is_resumed_and_broken_off(tmp_path, kind, stop):
    whole = train(new(), kind())
    trainer, loader = new(), kind()
    before = train(trainer, loader, epochs=2 if stop else 1, until=stop)
    trainer.save(tmp_path)
    assert same(before + train(load(tmp_path), kind()), whole)
    assert same(before + train(trainer, loader), whole)  # the same one, after a break


class AsTensors:
    """The batches of one of Hugging Face's streams, with its state."""

    def __init__(self, stream):
        self.dataset = stream
        self.state_dict, self.load_state_dict = stream.state_dict, stream.load_state_dict

    def __iter__(self):
        for batch in self.dataset:
            yield torch.tensor(batch["X"]), torch.tensor(batch["y"])


@pytest.mark.parametrize("stop", [1, 2, 5, BATCHES + 3])
def test_a_stream_that_draws_for_batches_of_its_own_is_resumed(tmp_path, stop):
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets are not installed")
    X, y = (one.tolist() for one in loading.tensors())

    def noisy(some):
        return {"X": [[one + random.random() for one in each] for each in some["X"]]}

    def loader():
        stream = datasets.Dataset.from_dict({"X": X, "y": y}).to_iterable_dataset(num_shards=2)
        return AsTensors(stream.map(noisy, batched=True, batch_size=7).batch(BATCH))

    whole = train(new(), loader())
    trainer = new()
    before = train(trainer, loader(), until=stop)
    trainer.save(tmp_path)
    assert same(before + train(load(tmp_path), loader()), whole)


class ShufflesInPlace:
    def __init__(self):
        self.order = [*range(EXAMPLES)]

    def __iter__(self):
        random.shuffle(self.order)
        X, y = loading.tensors()
        for some in torch.tensor(self.order).split(BATCH):
            yield X[some], y[some]


def test_an_order_that_changes_after_a_break_is_refused():
    with new() as trainer:
        loader = ShufflesInPlace()
        for _, batch in zip(range(3), trainer.epoch(loader), strict=False):
            trainer.step(*batch)
        with pytest.raises(CheckpointError, match="gives other batches in epoch 0 .* a break"):
            next(trainer.epoch(loader))


class Growing(Dataset):
    """Has more examples in each epoch."""

    examples = 8

    def set_epoch(self, epoch):
        self.examples = 8 * (epoch + 1)

    def __len__(self):
        return self.examples

    def __getitem__(self, index):
        X, y = loading.tensors()
        return X[index], y[index]


class Telling(DataLoader):
    """Is told the epoch itself, and tells its data set."""

    def set_epoch(self, epoch):
        self.dataset.examples = 8 * (epoch + 1)


class Told(Growing):
    set_epoch = None


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "make", [lambda **o: DataLoader(Growing(), **o), lambda **o: Telling(Told(), **o)]
)
def test_a_length_that_follows_from_the_epoch(tmp_path, make, workers):
    def loader():
        return make(batch_size=4, shuffle=True, num_workers=workers)

    whole = train(new(), loader(), epochs=3)
    assert len(whole) == 2 + 4 + 6
    trainer = new()
    before = train(trainer, loader(), epochs=2)
    trainer.save(tmp_path)
    assert same(before + train(load(tmp_path), loader(), epochs=3), whole)


@pytest.mark.parametrize("epochs", [1, 2])
def test_an_order_that_depends_on_earlier_epochs_is_said_at_the_start_of_one(
    tmp_path, caplog, epochs
):
    trainer = new()
    before = train(trainer, ShufflesInPlace(), epochs)
    trainer.save(tmp_path)
    found = before + train(load(tmp_path), ShufflesInPlace(), epochs + 1)
    lines = [one for one in caplog.messages if "its order depends on earlier epochs" in one]
    is_as_whole = same(found, train(new(), ShufflesInPlace(), epochs + 1))
    assert (is_as_whole, len(lines)) == (epochs == 1, epochs - 1)


def test_nothing_is_said_of_loaders_that_are_new_in_each_epoch(tmp_path, caplog):
    trainer = new()
    for epoch in (1, 2):
        train(trainer, numbered(epoch), epoch)
    trainer.save(tmp_path)
    train(load(tmp_path), numbered(3), 3)
    assert not caplog.messages


def test_other_batches_of_an_iterator_are_refused(tmp_path):
    trainer = new()
    train(trainer, iter(numbered(1)), until=5)
    trainer.save(tmp_path)
    with pytest.raises(CheckpointError, match="gives other batches in epoch 0"):
        train(load(tmp_path), iter(numbered(2)))


PARTS = {
    "drop_last": (loading.plain, {"drop_last": True}, "drop_last True instead of False"),
    "workers": (loading.Stream, {"num_workers": 1}, "num_workers 1 instead of 0"),
    "drop_last of a stream": (loading.Stream, {"drop_last": True}, "drop_last True instead of"),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_loader_that_would_end_an_epoch_otherwise_is_refused(tmp_path, name):
    dataset, changed, line = PARTS[name]
    trainer = new()
    train(trainer, DataLoader(dataset(), BATCH), until=5)
    trainer.save(tmp_path)
    with pytest.raises(CheckpointError, match=line):
        train(load(tmp_path), DataLoader(dataset(), BATCH, **changed))


@pytest.mark.parametrize("kind", kinds(sorted(PROCESSES - SPAWNED)))
def test_an_epoch_that_was_broken_off_leaves_no_worker(kind):
    with new() as trainer:
        next(trainer.epoch(loader_of(kind)))


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a_loader_that_calls_the_trainer(max_in_flight):
    """Beside steps in flight it would wait for lanes that wait for the loader's generators."""

    def batches(trainer):
        for X, y in loader_of("list"):
            trainer.predict([(X,)])
            yield X, y

    trainer = new(max_in_flight=max_in_flight)
    if max_in_flight == 1:
        train(trainer, batches(trainer), epochs=1)
        assert trainer.steps_done == BATCHES
    else:
        with pytest.raises(InputError, match="calls the trainer while it draws a batch"):
            train(trainer, batches(trainer), epochs=1)


def test_draws_in_threads_of_a_stream_are_said(caplog):
    """Hugging Face's `shuffle` makes what lies before it in threads, which nothing can seed."""
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets are not installed")

    def noisy(example):
        return {"x": example["x"] + torch.rand(()).item()}

    def said_of(made):
        stream = datasets.Dataset.from_dict({"x": [*range(32)]}).to_iterable_dataset()
        loader = DataLoader(made(stream).with_format("torch"), batch_size=8)
        with open_trainer(nn.Linear(1, 1)) as trainer:
            caplog.clear()
            for _ in range(2):
                assert len([*trainer.epoch(loader)]) == 4
        return [line for line in caplog.messages if "in threads of its own" in line]

    assert len(said_of(lambda stream: stream.map(noisy).shuffle(seed=1, buffer_size=4))) == 1
    assert not said_of(lambda stream: stream.shuffle(seed=1, buffer_size=4).map(noisy))
    assert not said_of(lambda stream: stream.map(noisy))
    assert not said_of(lambda stream: stream.map(lambda one: one).shuffle(seed=1, buffer_size=4))
