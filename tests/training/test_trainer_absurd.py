"""Absurd arguments and batches: an error of evenstep's own, at once, and nothing was changed."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import evenstep
from evenstep.devices import Device, find_devices
from evenstep.errors import (
    BatchError,
    DeviceError,
    EvenstepError,
    InputError,
    ModelError,
)
from evenstep.metrics import accuracy
from evenstep.training.setup.arguments import TrainerOptions
from fuzzing import ABSURD_NUMBERS, limited
from grouping import grouped
from layouts import own, shared
from patience import HUNG_TESTS_ABORT
from trainers import open_trainer, sgd
from zoo import build, make_batches

pytestmark = HUNG_TESTS_ABORT

BATCH = make_batches((24,))[0]
X, Y = BATCH


def train(batch=BATCH, *, model=None, **options):
    with open_trainer(model or build("convolution"), **{"devices": 1, **options}) as trainer:
        return trainer.step(*batch).item()


# ---- arguments


ARGUMENTS = [
    ("shards", 10**26, "got shards=1000.*: give an integer from 1 to 65536"),
    ("shards", 65_537, "from 1 to 65536"),
    ("shards", math.nan, "got shards=nan"),
    ("threads", 100_000, "got threads=100000: give an integer from 1 to 1024"),
    ("threads", 99_999_999_999, "from 1 to 1024"),
    ("batch_dim", 10**20, "from 0 to 64"),
    ("max_in_flight", 0, "max_in_flight=0"),
    ("devices", ["tpu:0"], "'tpu:0'"),
    ("devices", [], "empty list"),
    ("devices", ["cpu:0", "cpu:0"], "twice"),
    *([] if torch.cuda.is_available() else [("devices", ["cuda:0"], "0 GPUs")]),
    ("devices", 40_000, "got 40000 devices: use at most 1024 in one process"),
    ("devices", 10**20, "use at most 1024"),
    ("devices", "9" * 5000, "got device '999"),
    ("devices", f"cpu:{10**20}", "got device 'cpu:1000"),
    ("devices", shared(1025), "use at most 1024"),
    ("devices", [None], "got a device of type NoneType"),
    ("max_in_flight", 10**30, "from 1 to 1000"),
    ("max_in_flight", math.nan, "from 1 to 1000"),
    ("max_in_flight", 1.5, "from 1 to 1000"),
    ("check_every", math.nan, "got check_every=nan: give an integer of at least 1"),
    ("lost_after_s", math.nan, "got lost_after_s=nan: give a number of seconds above 0"),
    ("peer_timeout_s", 1e300, r"above 0, at most 31,536,000"),
    ("buffers", 3, "got buffers=3: give a dict"),
    ("before_update", 3, "got before_update=3: give a function"),
    ("after_update", "x", "got after_update='x': give a function"),
    ("callbacks", 3, "got 3 in callbacks: give a list of objects of classes that derive"),
    ("callbacks", [print], "got <built-in function print> in callbacks"),
    ("scheduler", 3, "got scheduler=3"),
]


@pytest.mark.parametrize(
    ("name", "value", "part"), ARGUMENTS, ids=[f"{number}" for number in range(len(ARGUMENTS))]
)
def test_an_absurd_argument_is_refused_at_once(name, value, part):
    with limited(name), pytest.raises(InputError, match=part) as caught:
        train(**{name: value})
    assert len(str(caught.value)) < 300


def test_a_device_is_never_lost_after_infinite_time():
    assert train(lost_after_s=math.inf) == train()


def test_the_threads_of_all_devices_together_have_a_limit():
    with pytest.raises(DeviceError, match="got 2 devices with 1100 intra-op threads in all"):
        find_devices(2, threads=550)


@pytest.mark.parametrize("fields", [{"threads": 1025}, {"index": -1}, {"index": 10**6}], ids=str)
def test_a_device_has_limits(fields):
    with pytest.raises(DeviceError, match="of a device: give an integer from"):
        Device(**{"kind": "cpu", "index": 0, **fields})


def test_so_many_shards_side_by_side_are_refused():
    with pytest.raises(InputError, match="at most 1024 shards can run side by side"):
        train(shards=1025, side_by_side=True)


def test_the_most_shards_are_taken():
    with limited("65,536 shards"):
        assert math.isfinite(train(shards=65_536))


# ---- batches


def holds_itself():
    batch = [X]
    batch.append(batch)
    return batch


def nested_deeply():
    batch = X
    for _ in range(100_000):
        batch = [batch]
    return batch


BATCHES = {
    "meta": (lambda: (X.to("meta"), Y), r"batch\[0\] is a tensor without data"),
    "meta labels": (lambda: (X, Y.to("meta")), r"batch\[1\] is a tensor without data"),
    "sparse": (lambda: (X.flatten(1).to_sparse(), Y), r"batch\[0\] is a sparse tensor"),
    "sparse rows": (lambda: (X.flatten(1).to_sparse_csr(), Y), r"batch\[0\] is a sparse tensor"),
    "jagged": (
        lambda: (torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged), Y[:2]),
        r"batch\[0\] is a nested tensor",
    ),
    "a shared one": (lambda: (X, Y, evenstep.shared(X.to("meta"))), "shared got a tensor without"),
    "itself": (lambda: (holds_itself(),), "nested too deeply, or that holds itself"),
    "deep": (lambda: (nested_deeply(),), "nested too deeply, or that holds itself"),
}


@pytest.mark.filterwarnings("ignore:.*(Sparse|nested)")
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.thinned(2)
def test_an_absurd_batch_is_refused_and_training_goes_on(name, max_in_flight):
    make, part = BATCHES[name]
    with open_trainer(build("convolution"), max_in_flight=max_in_flight) as trainer:
        trainer.step(*BATCH)
        before = trainer.fingerprint()
        with pytest.raises(BatchError, match=part):
            trainer.step(*make())
        with pytest.raises(BatchError, match=part):
            trainer.evaluate([make()], {"accuracy": accuracy})
        assert trainer.fingerprint() == before
        trainer.step(*BATCH)


# ---- models


def of_two(second):
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 36), second)


MODELS = {
    "script": (lambda: torch.jit.script(nn.Linear(36, 5)), "the model was made by torch.jit"),
    "traced": (
        lambda: torch.jit.trace(nn.Linear(36, 5), torch.ones(2, 36)),
        "the model was made by torch.jit",
    ),
    "a layer": (
        lambda: of_two(torch.jit.script(nn.Linear(36, 5))),
        "the layer 2 was made by torch.jit",
    ),
    "meta": (lambda: nn.Linear(36, 5, device="meta"), "weight of the model has no data"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_an_absurd_model_is_refused(name, devices):
    make, part = MODELS[name]
    with pytest.raises(ModelError, match=part):
        train(model=make(), devices=devices)


@pytest.mark.parametrize(
    ("name", "devices", "max_in_flight"),
    [
        ("convolution", shared(1), 2),
        ("batch_norm", shared(2), 1),
        ("convolution", own(2), 1),
        ("batch_norm", own(2), 2),
    ],
)
def test_after_a_layer_was_replaced_there_is_a_fingerprint_and_save_says_what_is_wrong(
    name, devices, max_in_flight, tmp_path
):
    model = build(name)
    with open_trainer(model, devices=devices, max_in_flight=max_in_flight) as trainer:
        trainer.step(*BATCH)
        before = trainer.fingerprint()
        model[-1] = nn.Linear(model[-1].in_features, model[-1].out_features)
        assert len(trainer.fingerprint()) == 64
        assert trainer.fingerprint() != before
        with pytest.raises(ModelError, match="parameters that are not the model's"):
            trainer.save(tmp_path)


def test_a_model_that_was_moved_to_the_meta_device_has_no_fingerprint(tmp_path):
    model = build("convolution")
    with open_trainer(model) as trainer:
        trainer.step(*BATCH)
        model.to("meta")
        with pytest.raises(ModelError, match="has no data"):
            trainer.fingerprint()


# ---- anything


_THINGS = st.sampled_from([
    *ABSURD_NUMBERS, None, "", "x", "9" * 5000, b"x", [], {}, [None], {"x": 1}, object(), int,
    "auto", "fp32", "bf16", "sync", "channels_last", "every 2", 2, 3, 8, False,
])  # fmt: skip

_OPTIONS = sorted(set(TrainerOptions.__annotations__) - {"lanes"})

_TENSORS = st.sampled_from([
    X, Y, X.double(), X[:0], X[:1], X.to("meta"), X.flatten(1).to_sparse(), X.half(), X.bool(),
    X[:, :, ::2], X.expand(2, *X.shape), torch.tensor(3.0),
    X.to(torch.complex64), torch.empty(24, 0), Y - 100, Y + 10**9, X * math.nan,
    X.clone().requires_grad_(),
    evenstep.shared(X.detach()), None, 3, "x", object(), Y.numpy(),
])  # fmt: skip

_NESTED = st.recursive(
    _TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=5,
)

_USERS = (RuntimeError, IndexError, TypeError, ValueError, AttributeError, NotImplementedError)
"""What torch raises in the user's own forward and loss for tensors that don't fit them."""


def error_of(function, *expected):
    """Call `function` within the limits; return its error of an expected kind, or None."""
    with limited("a call"):
        try:
            function()
        except expected as error:
            return error
    return None


def fuzz_arguments(options):
    options = {"devices": 1, **options}
    model = build("convolution")
    given = model, sgd(model), nn.CrossEntropyLoss()
    error = error_of(lambda: evenstep.Trainer(*given, **grouped(**options)), EvenstepError)
    assert error is None or len(str(error)) < 500
    if error is None and "compile" not in options:  # these take seconds by design
        theirs = {"objective", "before_update", "after_update"} & {*options}
        error_of(lambda: train(**options), EvenstepError, *(_USERS if theirs else ()))


def fuzz_batches(trainer, batch):
    before = trainer.fingerprint()
    error = error_of(lambda: trainer.step(*batch).item(), EvenstepError, *_USERS)
    if error is not None:
        assert trainer.fingerprint() == before
        ours = isinstance(error, EvenstepError)
        assert ours or any("in shard" in note for note in error.__notes__)


def fuzzer(strategy, examples, *, derandomize):
    return lambda function: settings(
        max_examples=examples,
        derandomize=derandomize,
        deadline=None,
        database=None,
        suppress_health_check=[*HealthCheck],
    )(given(strategy)(function))()


SOME_OPTIONS = st.dictionaries(st.sampled_from(_OPTIONS), _THINGS, min_size=1, max_size=2)
SOME_BATCHES = st.lists(_NESTED, max_size=3)


def few_or_many(few, many):
    """Run a test with few examples, always the same, and as a slow test with many new ones."""
    slow = [pytest.mark.slow, pytest.mark.timeout(900, method="thread")]
    return pytest.mark.parametrize(
        ("examples", "derandomize"),
        [
            pytest.param(few, True, marks=pytest.mark.timeout(60, method="thread"), id="few"),
            pytest.param(many, False, marks=slow, id="many"),
        ],
    )


@few_or_many(120, 4000)
def test_options_are_taken_or_refused(examples, derandomize):
    fuzzer(SOME_OPTIONS, examples, derandomize=derandomize)(fuzz_arguments)


@few_or_many(60, 3000)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_batches_are_trained_on_or_refused(examples, derandomize, max_in_flight):
    run = fuzzer(SOME_BATCHES, examples, derandomize=derandomize)
    with open_trainer(build("convolution"), max_in_flight=max_in_flight) as trainer:
        run(lambda batch: fuzz_batches(trainer, batch))
