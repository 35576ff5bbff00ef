"""Draws from generators that evenstep does not control are found: which generator, and where."""

import contextlib
import copy
import cProfile
import functools
import gc
import inspect
import logging
import pickle
import random
import statistics
import sys
import tempfile
import threading
import uuid

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evenstep.batch.rng import ShardRandomness, callers_generators
from evenstep.contract.outside.foreign_draws import ForeignDraws, outliving, refuse_foreign_draws
from evenstep.errors import ContractError


class Own:
    """Generators that live on."""

    python = random.Random(3)
    numpy = np.random.default_rng(3)
    philox = np.random.Generator(np.random.Philox(3))
    legacy = np.random.RandomState(3)
    torch = torch.Generator().manual_seed(3)


def twice(function, *, thorough=True):
    with ForeignDraws(thorough=thorough) as first:
        function()
    with ForeignDraws(thorough=thorough, after=first) as second:
        function()
    return first, second


def hooked():
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda gradient: gradient * np.random.rand())
    (x * 2).sum().backward()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(7)
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x) * self.rng.normal()


LAYER = Layer()
KEPT = {}


def lazily_kept(make):
    """Return a generator that is made at the first call and kept."""
    return KEPT.setdefault(make, make())


# Each function draws in its own line, in this file.
FOREIGN = {
    "random.random": ("Python's random module", lambda: random.random()),
    "random.choice": ("Python's random module", lambda: random.choice([1, 2, 3])),
    "random.gauss": ("Python's random module", lambda: [random.gauss(0, 1) for _ in range(3)]),
    "random.shuffle": ("Python's random module", lambda: random.shuffle([1, 2, 3])),
    "numpy.random.rand": ("numpy.random", lambda: np.random.rand(2)),
    "numpy.random.choice": ("numpy.random", lambda: np.random.choice(4, 2)),
    "numpy.random.randn": ("numpy.random", lambda: [np.random.randn() for _ in range(3)]),
    "numpy.random.shuffle": ("numpy.random", lambda: np.random.shuffle([1, 2, 3])),
    "numpy, by map": ("numpy.random", lambda: list(map(np.random.rand, [1, 2]))),
    "numpy, in a hook": ("numpy.random", hooked),
    "numpy, in a layer": ("a numpy.random.Generator", lambda: LAYER(torch.ones(2, 3))),
    "a Random": ("a random.Random", lambda: Own.python.uniform(0, 1)),
    "a Generator": ("a numpy.random.Generator", lambda: Own.numpy.normal()),
    "a Generator of Philox": ("a numpy.random.Generator", lambda: Own.philox.integers(9, size=4)),
    "a RandomState": ("a numpy.random.RandomState", lambda: Own.legacy.uniform()),
    "a new Generator of an old bit generator": (
        "a numpy.random.Generator",
        lambda: np.random.Generator(Own.numpy.bit_generator).normal(),
    ),
    "a torch.Generator": ("a torch.Generator", lambda: torch.rand(3, generator=Own.torch)),
    "a torch.Generator, in place": (
        "a torch.Generator",
        lambda: torch.empty(3).normal_(generator=Own.torch),
    ),
    "a torch.Generator, seeded": (
        "a torch.Generator",
        lambda: torch.rand(3, generator=Own.torch.manual_seed(5)),
    ),
    "the default torch.Generator": (
        "torch's default generator, given by generator=",
        lambda: torch.randn(3, generator=torch.default_generator),
    ),
    "a Random that is made once": (
        "a random.Random",
        lambda: lazily_kept(random.Random).random(),
    ),
    "a Generator that is made once": (
        "a numpy.random.Generator",
        lambda: lazily_kept(np.random.default_rng).random(),
    ),
    "a torch.Generator that is made once": (
        "a torch.Generator",
        lambda: torch.rand(2, generator=lazily_kept(torch.Generator)),
    ),
}


@pytest.mark.parametrize("generation", [0, 1, 2])
def test_generators_that_the_first_look_has_seen_being_made_are_found(generation):
    """Whatever the garbage collector does meanwhile."""

    def draw():
        lazily_kept(np.random.default_rng).random()
        gc.collect(generation)

    KEPT.clear()
    assert [draw.what for draw in outliving(*twice(draw))] == ["a numpy.random.Generator"]


HALVES = torch.full((3,), 0.5)
GIVEN = {
    "rand": lambda g: torch.rand(3, generator=g),
    "rand, out": lambda g: torch.rand(3, generator=g, out=torch.empty(3)),
    "randn": lambda g: torch.randn(3, generator=g, dtype=torch.float64),
    "randint": lambda g: torch.randint(9, (3,), generator=g),
    "randint from": lambda g: torch.randint(3, 9, (3,), generator=g),
    "randperm": lambda g: torch.randperm(5, generator=g),
    "normal": lambda g: torch.normal(HALVES, HALVES, generator=g),
    "normal of a number": lambda g: torch.normal(0.0, HALVES, generator=g),
    "bernoulli": lambda g: torch.bernoulli(HALVES, generator=g),
    "bernoulli of p": lambda g: torch.bernoulli(HALVES, p=0.5, generator=g),
    "multinomial": lambda g: torch.multinomial(HALVES, 2, generator=g),
    "poisson": lambda g: torch.poisson(HALVES, generator=g),
    "binomial": lambda g: torch.binomial(HALVES * 4, HALVES, generator=g),
    "dirichlet": lambda g: torch._sample_dirichlet(HALVES, generator=g),
    "gamma": lambda g: torch._standard_gamma(HALVES, generator=g),
    "noise": lambda g: torch.ops.aten.rrelu_with_noise(
        -HALVES, HALVES.clone(), training=True, generator=g
    ),
    "init": lambda g: nn.init.xavier_uniform_(torch.empty(3, 3), generator=g),
    "normal_": lambda g: torch.empty(3).normal_(generator=g),
    "uniform_": lambda g: torch.empty(3).uniform_(generator=g),
    "random_": lambda g: torch.empty(3).random_(generator=g),
    "random_ from": lambda g: torch.empty(3).random_(2, 5, generator=g),
    "exponential_": lambda g: torch.empty(3).exponential_(generator=g),
    "cauchy_": lambda g: torch.empty(3).cauchy_(generator=g),
    "log_normal_": lambda g: torch.empty(3).log_normal_(generator=g),
    "geometric_": lambda g: torch.empty(3).geometric_(0.5, generator=g),
    "bernoulli_": lambda g: torch.empty(3).bernoulli_(0.5, generator=g),
}


@pytest.mark.parametrize("name", GIVEN)
def test_every_op_that_is_given_a_generator_is_noticed(name):
    first, second = twice(lambda: GIVEN[name](Own.torch), thorough=False)
    assert [draw.what for draw in outliving(first, second)] == ["a torch.Generator"]
    assert {draw.file for draw in first.found} == {__file__}


def test_generators_that_were_frozen_are_found_and_stay_frozen():
    gc.freeze()
    try:
        draws = outliving(*twice(FOREIGN["a Generator"][1]))
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    assert {draw.what for draw in draws} == {FOREIGN["a Generator"][0]}


def numbers_after(function):
    """Seed all generators and call the function; return its result, and what they draw next."""
    KEPT.clear()
    random.seed(1)
    np.random.seed(1)
    np.random.randn()  # leaves the second number of a pair behind
    torch.manual_seed(1)
    LAYER.__init__()
    Own.python.seed(1)
    Own.torch.manual_seed(1)
    Own.numpy.bit_generator.state = np.random.default_rng(1).bit_generator.state
    Own.philox.bit_generator.state = np.random.Philox(1).state
    Own.legacy.seed(1)
    Own.legacy.randn()
    return function(), [
        *(random.gauss(0, 1), Own.python.random(), np.random.randn(), np.random.rand()),
        *(Own.numpy.normal(), Own.philox.normal(), Own.legacy.randn(), Own.legacy.rand()),
        *(torch.rand(()).item(), torch.rand((), generator=Own.torch).item()),
        Own.torch.initial_seed(),
    ]


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.thinned(4)
def test_a_foreign_draw_is_named_with_its_place_and_stays_the_same(name):
    what, function = FOREIGN[name]
    (first, second), watched = numbers_after(lambda: twice(function))
    assert watched == numbers_after(lambda: (function(), function()))[1]
    draws = outliving(first, second)
    assert {draw.what for draw in draws} == {what}
    assert {draw.file for draw in draws} == {__file__}
    lines, start = inspect.getsourcelines(Layer if "layer" in name else function)
    assert {draw.line for draw in draws} <= set(range(start, start + len(lines)))
    with pytest.raises(ContractError, match="a shard draws from") as caught:
        refuse_foreign_draws(first, second)
    assert str(caught.value).startswith(
        f"a shard draws from {what} in {__file__}, line {draws[0].line} (in {draws[0].function})"
    )


@pytest.mark.parametrize("name", FOREIGN)
def test_objects_of_numpy_take_a_thorough_look(name):
    what, function = FOREIGN[name]
    KEPT.clear()
    named = {draw.what for draw in outliving(*twice(function, thorough=False))}
    assert named == (set() if what.startswith("a numpy") else {what})


def made_inside():
    python, numpy = random.Random(3), np.random.default_rng(3)
    legacy, own = np.random.RandomState(3), torch.Generator().manual_seed(3)
    python.random(), numpy.normal(), legacy.randn(), torch.rand(3, generator=own)
    torch.rand(3, generator=torch.Generator().set_state(own.get_state()))


def copied():
    """Copies of generators that live on: they are left as they are."""
    copy.deepcopy(Own.numpy).normal(), pickle.loads(pickle.dumps(Own.legacy)).rand()
    copy.deepcopy(Own.python).random()
    torch.rand(3, generator=Own.torch.clone_state())


def states():
    np.random.get_state(), random.getstate(), Own.torch.get_state(), Own.numpy.bit_generator.state


def of_torch():
    torch.rand(3), F.dropout(torch.ones(3)), torch.randperm(5), nn.Linear(3, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        nn.init.normal_(torch.empty(3))


def library():
    with tempfile.NamedTemporaryFile():
        uuid.uuid1(), uuid.uuid4()
    logging.getLogger("nobody").info("draws nothing")


HARMLESS = (made_inside, copied, states, of_torch, library)


@pytest.mark.parametrize("randomness", [contextlib.nullcontext, ShardRandomness])
def test_harmless_draws_are_not_refused(randomness):
    def shard():
        with randomness(lambda: 3):
            for draw in HARMLESS:
                draw()

    with callers_generators():
        first, second = twice(shard)
    assert outliving(first, second) == []
    refuse_foreign_draws(first, second)


def test_a_helper_of_pythons_library_is_named_where_it_draws():
    first, second = twice(lambda: statistics.NormalDist().samples(2))
    assert {draw.file for draw in outliving(first, second)} == {statistics.__file__}


def test_draws_inside_a_shards_randomness_are_found():
    def shard():
        with ShardRandomness(lambda: 3):
            torch.rand(3)
            torch.rand(3, generator=Own.torch)

    assert [draw.what for draw in outliving(*twice(shard))] == ["a torch.Generator"]


def test_draws_of_other_threads_are_left_alone():
    """A data loader may draw from anything meanwhile."""
    begun, done = threading.Event(), threading.Event()
    python, numpy, own = random.Random(2), np.random.default_rng(2), torch.Generator()

    def load():
        while not done.is_set():
            random.random(), np.random.randn(), python.random(), numpy.normal()
            torch.rand(3, generator=own), torch.rand(3)
            begun.set()

    def shard():
        for _ in range(20):
            F.linear(torch.ones(200, 200), torch.ones(200, 200))

    loader = threading.Thread(target=load)
    loader.start()
    try:
        assert begun.wait(30)
        first, second = twice(shard)
    finally:
        done.set()
        loader.join()
    assert first.found == second.found == []


def test_everything_is_put_back():
    bits = Own.numpy.bit_generator, Own.legacy._bit_generator, np.random.mtrand._rand._bit_generator
    with pytest.raises(ZeroDivisionError), ForeignDraws(thorough=True):
        raise ZeroDivisionError
    assert sys.getprofile() is None
    assert bits == (
        *(Own.numpy.bit_generator, Own.legacy._bit_generator),
        np.random.mtrand._rand._bit_generator,
    )
    assert [type(one) for one in bits] == [np.random.PCG64, np.random.MT19937, np.random.MT19937]
    with ForeignDraws(thorough=True) as later:
        pass
    np.random.rand(), random.random(), torch.rand(3, generator=Own.torch)
    assert later.found == []


def test_a_profiler_goes_on():
    profiler = cProfile.Profile()
    profiler.enable()
    before = sys.getprofile()
    with ForeignDraws() as draws:
        np.random.rand(), random.random()
    after = sys.getprofile()
    profiler.disable()
    assert after is before
    assert "numpy.random" in [draw.what for draw in draws.found]


def test_a_place_is_listed_once():
    with ForeignDraws() as draws:
        for _ in range(5):
            random.random(), np.random.rand(), torch.rand(3, generator=Own.torch)
    assert len(draws.found) == 3


def test_a_compiled_layer_is_computed_as_ever():
    @functools.partial(torch.compile, backend="eager", fullgraph=True)
    def double(x):
        return x * 2

    with ForeignDraws() as draws:
        assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
    assert draws.found == []
