"""Records of evenstep's own trainings: each layout is the same run, also beside a plain loop."""

import functools

import pytest
import torch
from torch import nn

import evenstep
from evenstep.comparison import Cause
from evenstep.comparison.reading import read_run
from launched import alone, launched

BATCHES, SIZE = 3, 48
MODELS = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "group norm": lambda: nn.GroupNorm(2, 8),
    "dropout": nn.Dropout,
}
LAYOUTS = {
    "two devices": {"devices": 2},
    "own memory": {"devices": ["cpu:0", "cpu:1:own"]},
    "in flight": {"devices": 2, "max_in_flight": 2},
    "side by side": {"devices": 2, "layout": evenstep.Layout(side_by_side=True)},
    "stages": {
        "devices": 2,
        "layout": evenstep.Layout(divide=evenstep.Stages({"0": 0, "3": 1})),
    },
}


def build(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), MODELS[kind](), nn.ReLU(), nn.Linear(8, 3))


def batches(ignored=0):
    generator = torch.Generator().manual_seed(1)
    for _ in range(BATCHES):
        y = torch.randint(0, 3, (SIZE,), generator=generator)
        y[:ignored] = -100
        yield torch.randn(SIZE, 4, generator=generator), y


def train(kind, *, ignored=0, optimizer=torch.optim.Adam, **options):
    model = build(kind)
    options = {"devices": 1, **options}
    with evenstep.Trainer(
        model, optimizer(model.parameters(), 0.01), nn.CrossEntropyLoss(), **options
    ) as trainer:
        for X, y in batches(ignored):
            trainer.step(X, y)


def train_plainly(kind, *, ignored=0, parts=1):
    model = build(kind)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for X, y in batches(ignored):
        optimizer.zero_grad()
        for part, targets in zip(X.chunk(parts), y.chunk(parts), strict=True):
            (nn.functional.cross_entropy(model(part), targets) / parts).backward()
        optimizer.step()


@pytest.fixture(scope="module")
def record_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")

    @functools.cache
    def record(function, kind, **options):
        path = folder / f"{len([*folder.iterdir()])}.rec"
        with evenstep.record(path):
            function(kind, **options)
        return path

    return record


@pytest.fixture
def compared(record_of, tmp_path):
    """Return a function that compares a training of some options with one on one device."""

    def compare(kind, options, one=None):
        with evenstep.record(tmp_path / "other.rec"):
            train(kind, **options)
        return evenstep.compare(one or record_of(train, kind), tmp_path / "other.rec")

    return compare


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.thinned(2)
def test_layouts_are_one_run(compared, kind, layout):
    assert compared(kind, LAYOUTS[layout]).cause is Cause.NOTHING


@pytest.mark.parametrize(
    ("kind", "options", "cause"),
    [
        ("batch norm", {"shards": 4}, Cause.BATCH_NORM),
        ("batch norm", {"experiment": evenstep.Experiment(batch_norm="sync")}, Cause.BATCH_NORM),
        ("dropout", {"seed": 1}, Cause.DROPOUT),
        ("group norm", {"shards": 4}, Cause.SUM),
        ("group norm", {"optimizer": torch.optim.SGD}, Cause.SETTINGS),
    ],
    ids=str,
)
def test_other_experiments_are_not(compared, kind, options, cause):
    assert compared(kind, options).cause is cause


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("kind", "options", "cause"),
    [
        ("batch norm", {}, Cause.BATCH_NORM),
        ("dropout", {}, Cause.DROPOUT),
        ("group norm", {}, Cause.SUM),
        ("group norm", {"ignored": 7}, Cause.SUM),
        ("group norm", {"ignored": 7, "parts": 2}, Cause.MEAN),
    ],
    ids=str,
)
def test_a_plain_loop_beside_one(compared, record_of, kind, options, cause, devices):
    plain = record_of(train_plainly, kind, **options)
    ignored = options.get("ignored", 0)
    found = compared(kind, {"devices": devices, "ignored": ignored}, plain)
    assert found.cause is cause


def test_it_holds_each_shard_once_and_no_check(record_of):
    (process,) = read_run(record_of(train, "batch norm")).processes
    for step, (X, _) in zip(process.steps, batches(), strict=True):
        assert len(step.examples) == len({*step.examples}) == len(X)
        assert [call.module for call in step.calls].count("1") == 8
        assert len(step.losses) == 1
    assert {*process.weights} == {name for name, _ in build("batch norm").named_parameters()}


@pytest.mark.slow
def test_compiled_shards_leave_weights_and_losses(compared):
    experiment = evenstep.Experiment(compile=True)
    assert compared("group norm", {"experiment": experiment}).cause is Cause.SUM


@pytest.mark.parametrize("words", [(), ("owners",)], ids=str)
def test_processes_are_one_run(tmp_path, words):
    one, two = tmp_path / "one.rec", tmp_path / "two.rec"
    for ended in (alone("own_recorded.py", one), launched(2, "own_recorded.py", two, *words)):
        assert ended.returncode == 0, ended.stderr
    assert len(read_run(two).processes) == 2
    assert evenstep.compare(one, two).cause is Cause.NOTHING
