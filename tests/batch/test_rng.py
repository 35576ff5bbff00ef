"""A shard draws the random numbers of `torch.manual_seed` and the shard computed alone."""

import hashlib
import itertools
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from evenstep.batch import rng
from evenstep.batch.rng import ShardRandomness, callers_generators
from evenstep.batch.seeds import derive_seed, shard_seed
from evenstep.errors import ModelError

SEED = 2**40 + 17


# ---- seeds


def test_a_seed_is_the_hash_of_its_parts():
    digest = hashlib.sha256(b"str:shard/int:3/int:0/int:12/int:7").digest()
    expected = int.from_bytes(digest[:8], "little") // 2
    assert derive_seed("shard", 3, 0, 12, 7) == expected
    assert shard_seed(3, 0, 12, 7) == expected
    assert shard_seed(shard=7, step=12, epoch=0, seed=3) == expected


PARTS = st.lists(st.integers() | st.text("ab-:01", max_size=4), max_size=5)


@given(parts=PARTS)
def test_a_seed_fits_every_generator(parts):
    assert torch.Generator().manual_seed(derive_seed(*parts)).initial_seed() == derive_seed(*parts)
    assert 0 <= derive_seed(*parts) < 2**63


@given(one=PARTS, other=PARTS)
def test_other_parts_have_other_seeds(one, other):
    assert (derive_seed(*one) == derive_seed(*other)) == (one == other)


def test_every_shard_of_every_step_has_its_own_seed():
    places = list(itertools.product(range(3), range(4), range(20), range(16)))
    assert len({shard_seed(*place) for place in places}) == len(places)


def test_kinds_and_places_of_parts_count():
    parts = [(1, 2), (2, 1), (12,), ("1", 2), ("12",), (1, 2, 0), ("order", 1, 2), ()]
    assert len({derive_seed(*each) for each in parts}) == len(parts)
    assert derive_seed("order", np.int64(7), np.int32(0)) == derive_seed("order", 7, 0)


# ---- draws


def fixed(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def lstm():
    layer = nn.LSTM(4, 5, num_layers=3, dropout=0.4)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 0.1)
    return layer(fixed(6, 2, 4))[0]


def attention(**options):
    query = fixed(2, 3, 8, 4) / 100
    return F.scaled_dot_product_attention(query, query, query, **options)


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 0.1)
    return layer(fixed(3, 5, 8))


@torch.library.custom_op("evenstep_tests::own_op", mutates_args=())
def own_op(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


def forked():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch.initial_seed() // 2 + len(torch.get_rng_state()))
        drawn = torch.rand(5)
    return torch.cat([drawn, torch.rand(5)])


def put_back():
    state = torch.get_rng_state()
    drawn = torch.rand(5)
    torch.set_rng_state(state)
    return torch.cat([drawn, torch.rand(7)])


OPS = {
    "nn.Dropout": lambda: nn.Dropout(0.4)(fixed(50)),
    "F.dropout in place": lambda: F.dropout(fixed(50), 0.3, inplace=True),
    "F.dropout2d": lambda: F.dropout2d(fixed(5, 6, 2, 2), 0.5),
    "F.alpha_dropout": lambda: F.alpha_dropout(fixed(50), 0.5, training=True),
    "bernoulli": lambda: torch.bernoulli(torch.full((50,), 0.3)),
    "bernoulli_": lambda: torch.empty(50).bernoulli_(0.3),
    "normal": lambda: torch.normal(fixed(20), fixed(20)),
    "normal_": lambda: torch.empty(50).normal_(2, 3),
    "uniform_": lambda: torch.empty(50).uniform_(-1, 1),
    "exponential_": lambda: torch.empty(50).exponential_(),
    "random_": lambda: torch.empty(50, dtype=torch.int64).random_(),
    "gumbel_softmax": lambda: F.gumbel_softmax(fixed(4, 5)),
    "poisson": lambda: torch.poisson(fixed(20)),
    "gamma": lambda: torch.distributions.Gamma(fixed(9), fixed(9)).rsample(),
    "rand": lambda: torch.rand(3, 5),
    "rand double": lambda: torch.rand(30, dtype=torch.float64),
    "rand out": lambda: torch.rand(3, 5, out=torch.empty(3, 5)),
    "rand_like": lambda: torch.rand_like(fixed(4, 5)),
    "randn": lambda: torch.randn(40),
    "randn_like": lambda: torch.randn_like(fixed(4, 5)),
    "randint": lambda: torch.randint(100, (30,)),
    "randint between": lambda: torch.randint(-50, 50, (30,)),
    "randint_like": lambda: torch.randint_like(fixed(30), 5, 90),
    "randperm": lambda: torch.randperm(40),
    "multinomial": lambda: torch.multinomial(fixed(30), 20),
    "multinomial with replacement": lambda: torch.multinomial(fixed(30), 50, replacement=True),
    "rrelu": lambda: F.rrelu(-fixed(40), training=True),
    "rrelu_": lambda: F.rrelu(-fixed(40), training=True, inplace=True),
    "fractional_max_pool2d": lambda: F.fractional_max_pool2d(fixed(1, 9, 99, 99), 2, (40, 40)),
    "LSTM": lstm,
    "scaled_dot_product_attention": lambda: attention(dropout_p=0.4),
    "transformer": transformer,
    "native_dropout": lambda: torch.native_dropout(fixed(50), 0.5, True)[0],
    "custom op": lambda: own_op(fixed(20)),
    "manual_seed and fork_rng": forked,
    "set_rng_state": put_back,
}


@pytest.fixture(autouse=True)
def _callers_generators():
    """As while a trainer is open."""
    with callers_generators():
        yield


def alone(op, seed=SEED, times=2):
    """Return what `op` gives after `torch.manual_seed(seed)`; the default generator is restored."""
    before = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        return [op() for _ in range(times)]
    finally:
        torch.set_rng_state(before)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_draws_are_those_of_manual_seed(name, mode):
    with mode():
        expected = alone(OPS[name])
        before = torch.get_rng_state()
        with ShardRandomness(lambda: SEED):
            drawn = [OPS[name](), OPS[name]()]
        assert same(drawn, expected)
        assert torch.equal(torch.get_rng_state(), before)
        assert not torch.equal(*drawn)  # the op is random, so the test can fail
        assert not same(drawn, alone(OPS[name], SEED + 1))


def test_all_draws_of_a_shard_come_from_one_stream():
    def draw_all():
        return torch.cat([op().flatten().double() for op in OPS.values()])

    with ShardRandomness(lambda: SEED):
        drawn = draw_all()
    assert torch.equal(drawn, alone(draw_all, times=1)[0])


def test_randomness_ends_with_its_context():
    expected = alone(lambda: torch.rand(5), seed=3, times=1)[0]
    torch.manual_seed(3)
    with ShardRandomness(lambda: SEED):
        torch.rand(5)
    assert torch.equal(torch.rand(5), expected)


@pytest.mark.parametrize(
    "op",
    [
        lambda **options: torch.rand(5, **options),
        lambda **options: torch.empty(5).normal_(**options),
        lambda **options: torch.randperm(20, **options),
        lambda **options: torch.multinomial(fixed(20), 9, **options),
        lambda generator: torch.ops.aten.rrelu(-fixed(30), 0.1, 0.9, True, generator),
    ],
    ids=["rand", "normal_", "randperm", "multinomial", "rrelu, by place"],
)
def test_a_generator_that_the_user_passes_is_used(op):
    expected = op(generator=torch.Generator().manual_seed(8))
    plain = alone(lambda: torch.rand(5), times=1)[0]
    with ShardRandomness(lambda: SEED):
        given = op(generator=torch.Generator().manual_seed(8))
        assert torch.equal(torch.rand(5), plain)  # the shard's own stream has not moved
    assert torch.equal(given, expected)


def test_threads_side_by_side_draw_as_if_alone():
    names = list(OPS)
    barrier = threading.Barrier(2)
    drawn = {}

    def draw(seed):
        torch.set_num_threads(1)
        with ShardRandomness(lambda: seed):
            results = []
            for name in names:
                barrier.wait(30)  # the two take turns, or meet, in every op
                results.append(OPS[name]())
            drawn[seed] = results

    before = torch.get_rng_state()
    threads = [threading.Thread(target=draw, args=(seed,)) for seed in (SEED, SEED + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(torch.get_rng_state(), before)
    for seed in (SEED, SEED + 1):
        expected = alone(lambda: [op() for op in OPS.values()], seed, times=1)[0]
        assert same(drawn[seed], expected)


LONG_OPS = {
    "rand": lambda: torch.rand(300_000),
    "randperm": lambda: torch.randperm(30_000),
    "native_dropout": lambda: torch.native_dropout(torch.ones(300_000), 0.5, True),
    "custom op": lambda: own_op(torch.ones(300_000)),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", [*LONG_OPS, "dropout"])
def test_the_default_generator_of_the_cpu_is_never_used(name, mode):
    """So a thread of the user's own may draw from it meanwhile."""
    op = LONG_OPS.get(name, lambda: F.dropout(torch.ones(300_000)))
    before = torch.get_rng_state()
    seen, done = [], threading.Event()

    def watch():
        while not done.is_set():
            seen.append(torch.equal(torch.get_rng_state(), before))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with mode(), ShardRandomness(lambda: SEED):
            for _ in range(30):  # long enough for the watcher to look in
                op()
    finally:
        done.set()
        watcher.join()
    assert seen
    assert all(seen)


# ---- what no shard draws, and what an op draws inside another one


def test_a_backward_pass_of_the_user_s_own_may_draw_in_a_thread_of_autograd_s(monkeypatch):
    """On a GPU, each one is computed there."""
    with ShardRandomness(lambda: SEED):
        torch.rand(1)
    monkeypatch.setattr(rng, "is_autograds_thread", lambda: True)
    torch.manual_seed(3)
    drawn = torch.rand(1)
    assert torch.equal(drawn, torch.rand(1, generator=torch.Generator().manual_seed(3)))
    others, done = threading.Event(), threading.Event()

    def compute_shard():
        with ShardRandomness(lambda: SEED):
            others.set()
            done.wait(10)  # seconds

    thread = threading.Thread(target=compute_shard)
    thread.start()
    others.wait(10)
    try:
        with pytest.raises(ModelError, match="use_reentrant=False"):
            torch.rand(1)
    finally:
        done.set()
        thread.join()


def test_an_op_that_draws_inside_another_one_moves_the_shard_s_generator_on():
    """Such as that which seeds the dropout of cuDNN's recurrent layers."""
    randomness = ShardRandomness(lambda: SEED)
    own = torch.Generator().manual_seed(SEED)
    with randomness:
        drawn = [torch.rand(())]
        with rng._as_default(randomness.generator(torch.device("cpu"))):
            drawn += [torch.rand(()) for _ in range(2)]
        drawn.append(torch.rand(()))
    assert drawn == [torch.rand((), generator=own) for _ in range(4)]
