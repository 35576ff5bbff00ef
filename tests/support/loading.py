"""Loaders of every kind that people have, of the same numbered examples.

`loader_of(kind)` makes one as a script does when it starts. Everything here can be pickled, for
worker processes that are spawned.
"""

import random
import warnings

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from evenstep.data import Loader

EXAMPLES, BATCH, FEATURES, CLASSES = 46, 4, 3, 5
BATCHES = 12  # of an epoch; the last has two examples


def tensors():
    generator = torch.Generator().manual_seed(3)
    X = torch.randn(EXAMPLES, FEATURES, generator=generator)
    return X, torch.randint(CLASSES, (EXAMPLES,), generator=generator)


def plain():
    return TensorDataset(*tensors())


class Augmented(Dataset):
    """Draws from the three default generators, and from three of its own."""

    def __init__(self):
        self.X, self.y = (tensor.numpy() for tensor in tensors())
        self.own = torch.Generator()
        self.inside = {"numpy": [np.random.default_rng()], "python": random.Random()}
        self.fetched = []

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        self.fetched.append(int(index))
        noise = torch.randn(1) + random.random() + np.random.random()
        noise += torch.randn(1, generator=self.own)
        noise += self.inside["numpy"][0].random() + self.inside["python"].random()
        return torch.from_numpy(self.X[index]) + noise, self.y[index]


class Sendable(Augmented):
    """Holds no tensor: not every machine can send one to a worker process that is spawned."""

    def __init__(self):
        super().__init__()
        del self.own

    def __getitem__(self, index):
        self.fetched.append(int(index))
        noise = torch.randn(1) + random.random() + self.inside["numpy"][0].random()
        return torch.from_numpy(self.X[index]) + noise, self.y[index]


class Quiet(Augmented):
    """Draws nothing."""

    def __getitem__(self, index):
        self.fetched.append(int(index))
        return torch.from_numpy(self.X[index]), self.y[index]


class InLists(Quiet):
    """Fetches many examples at once, with noise from one call."""

    def __getitems__(self, indices):
        noise = torch.randn(len(indices))
        return [
            (torch.from_numpy(self.X[index]) + one, self.y[index])
            for index, one in zip(indices, noise, strict=True)
        ]


class Shuffled(Sampler):
    """Draws from Python's generator, or from its own."""

    def __init__(self, own=None):
        self.own = own

    def __len__(self):
        return EXAMPLES

    def __iter__(self):
        order = list(range(EXAMPLES))
        (self.own or random).shuffle(order)
        return iter(order)


class ByEpoch(Shuffled):
    """Is told the epoch, and seeds itself by it."""

    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(np.random.default_rng(self.epoch).permutation(EXAMPLES).tolist())


class Unseeded(Shuffled):
    """Draws from the system's entropy."""

    def __iter__(self):
        return iter(random.SystemRandom().sample(range(EXAMPLES), EXAMPLES))


class Stream(IterableDataset):
    """Yields examples with noise, in an order that it draws; each worker every n-th."""

    def __iter__(self):
        X, y = tensors()
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        order = np.random.permutation(EXAMPLES) if info is None else np.arange(EXAMPLES)
        for index in order[first::step]:
            yield X[index] + torch.randn(1) + random.random(), y[index]


class StatefulStream(IterableDataset):
    """Goes on behind the last example, also into the next epoch; an epoch has 12 batches."""

    def __init__(self):
        self.place = 0
        self.drawn = 0

    def __iter__(self):
        X, y = tensors()
        is_over = False
        while not is_over:
            index = self.place * 7 % EXAMPLES
            self.place += 1
            self.drawn += 1
            is_over = self.place % (BATCHES * BATCH) == 0
            yield X[index] + self.place / EXAMPLES + torch.randn(1), y[index]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class WithStatefulIterator(IterableDataset):
    """Has no state, but its iterators have."""

    def __iter__(self):
        return _Rows()


class _Rows:
    def __init__(self):
        self.next = 0

    def __iter__(self):
        return self

    def __next__(self):
        X, y = tensors()
        if self.next == EXAMPLES:
            raise StopIteration
        self.next += 1
        return X[self.next - 1] + torch.randn(1), y[self.next - 1]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class StatefulBatches:
    """A loader of one's own with a state; knows how many batches it has made."""

    def __init__(self):
        self.next = 0
        self.made = 0

    def __iter__(self):
        X, y = tensors()
        while True:
            self.made += 1
            self.next += 1
            rows = torch.arange(self.next, self.next + 5) % EXAMPLES
            yield X[rows] + torch.rand(1), y[rows]
            if self.next % BATCHES == 0:
                return

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Generated:
    """Makes a generator for each epoch."""

    def __iter__(self):
        X, y = tensors()
        for _ in range(BATCHES):
            rows = torch.randint(EXAMPLES, (9,))
            yield {"input": X[rows], "target": y[rows]}


def masked(examples):
    """Collate, and mask some inputs."""
    X, y = default_collate(examples)
    return X * (torch.rand_like(X) < 0.7), y


def of_hugging_face(streaming, shuffled=False):
    import datasets

    X, y = tensors()
    found = datasets.Dataset.from_dict({"input": X.tolist(), "target": y.tolist()})
    if not streaming:
        return DataLoader(found.with_format("torch"), BATCH, shuffle=True)
    stream = found.to_iterable_dataset(num_shards=2)
    stream = stream.shuffle(seed=5, buffer_size=10) if shuffled else stream
    return DataLoader(stream.with_format("torch"), BATCH)


def of_hugging_face_itself(shuffled=False):
    import datasets

    X, y = tensors()
    found = datasets.Dataset.from_dict({"input": X.tolist(), "target": y.tolist()})
    stream = found.to_iterable_dataset(num_shards=2)
    stream = stream.shuffle(seed=5, buffer_size=10) if shuffled else stream
    return stream.with_format("torch").batch(BATCH)


def of_torchdata(dataset, **options):
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():  # it calls what this version of torch has deprecated
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        return StatefulDataLoader(dataset, BATCH, **options)


def weighted():
    weights = torch.linspace(1, 3, EXAMPLES)
    return WeightedRandomSampler(weights, EXAMPLES)


def workers(start="fork", number=2, **options):
    return {"num_workers": number, "multiprocessing_context": start, **options}


KINDS = {
    "in order": lambda: DataLoader(plain(), BATCH),
    "shuffled": lambda: DataLoader(plain(), BATCH, shuffle=True),
    "own generator": lambda: DataLoader(plain(), BATCH, shuffle=True, generator=torch.Generator()),
    "drop_last": lambda: DataLoader(plain(), BATCH, shuffle=True, drop_last=True),
    "weighted": lambda: DataLoader(Augmented(), BATCH, sampler=weighted()),
    "python's sampler": lambda: DataLoader(plain(), BATCH, sampler=Shuffled()),
    "sampler's own": lambda: DataLoader(plain(), BATCH, sampler=Shuffled(random.Random())),
    "set_epoch": lambda: DataLoader(plain(), BATCH, sampler=ByEpoch()),
    "batch sampler": lambda: DataLoader(
        plain(), batch_sampler=BatchSampler(Shuffled(), 5, drop_last=False)
    ),
    "lists of indices": lambda: DataLoader(
        plain(), sampler=BatchSampler(RandomSampler(range(EXAMPLES)), 5, False), batch_size=None
    ),
    "augmented": lambda: DataLoader(Augmented(), BATCH, shuffle=True),
    "quiet": lambda: DataLoader(Quiet(), BATCH, shuffle=True),
    "in lists": lambda: DataLoader(InLists(), BATCH, shuffle=True),
    "collate_fn": lambda: DataLoader(plain(), BATCH, shuffle=True, collate_fn=masked),
    "fork": lambda: DataLoader(Augmented(), BATCH, shuffle=True, **workers()),
    "forkserver": lambda: DataLoader(Sendable(), BATCH, shuffle=True, **workers("forkserver")),
    "spawn": lambda: DataLoader(
        Sendable(), BATCH, shuffle=True, collate_fn=masked, **workers("spawn")
    ),
    "persistent": lambda: DataLoader(
        Augmented(), BATCH, shuffle=True, **workers(persistent_workers=True)
    ),
    "stream": lambda: DataLoader(Stream(), BATCH),
    "stream fork": lambda: DataLoader(Stream(), BATCH, **workers()),
    "stream persistent": lambda: DataLoader(Stream(), BATCH, **workers(persistent_workers=True)),
    "list": lambda: [(X, y) for X, y in DataLoader(plain(), BATCH)],
    "generators": Generated,
    "own state": StatefulBatches,
    "torchdata": lambda: of_torchdata(Augmented(), shuffle=True),
    "torchdata fork": lambda: of_torchdata(Augmented(), shuffle=True, **workers()),
    "torchdata stream": lambda: of_torchdata(StatefulStream()),
    "torchdata without a state": lambda: of_torchdata(Stream()),
    "torchdata iterator": lambda: of_torchdata(WithStatefulIterator()),
    "torchdata stream fork": lambda: of_torchdata(StatefulStream(), **workers()),
    "datasets": lambda: of_hugging_face(streaming=False),
    "datasets stream": lambda: of_hugging_face(streaming=True),
    "datasets stream shuffled": lambda: of_hugging_face(streaming=True, shuffled=True),
    "datasets itself": of_hugging_face_itself,
    "datasets itself shuffled": lambda: of_hugging_face_itself(shuffled=True),
}

OWN = {  # evenstep's, whose order follows from a seed of its own
    "evenstep's": lambda: Loader(Augmented(), BATCH, seed=3),
    "evenstep's fork": lambda: Loader(Augmented(), BATCH, seed=3, num_workers=2),
}

PROCESSES = {"fork", "persistent", "stream fork", "stream persistent", "torchdata fork"}
PROCESSES |= {"torchdata stream fork", "forkserver", "spawn"}


def arguments_of(batch):
    """Return what `step` takes of a batch of any kind."""
    if isinstance(batch, dict):
        return batch["input"], batch["target"]
    return tuple(batch)
