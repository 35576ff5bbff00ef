"""What a resume gives when one fact has changed since the checkpoint: the table.

Each fact that a training's bits depend on is refused by name, or said once with `within_rounding`.
What they don't depend on changes nothing: the resumed training ends with the bits of a plain one.
"""

import contextlib
import logging
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import evenstep
from evenstep.data import Loader
from evenstep.errors import EvenstepError
from grouping import grouped
from resuming import rewritten
from warm import run

X = (torch.arange(240) * 37 % 64 - 32).float().reshape(40, 6) / 32  # the same on any processor
Y = torch.arange(40) % 3
SAVED_AT, STEPS = 2, 7  # an epoch has five batches


class Items(Dataset):
    """Examples that are computed one by one, as those of files are."""

    def __init__(self, order=None, factor=1.0, examples=40):
        self.order = list(range(examples)) if order is None else order
        self.factor = factor

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        where = self.order[index]
        return X[where] * self.factor, Y[where]


class Squashed(nn.Module):
    """A layer of the user's own."""

    def forward(self, x):
        return x.tanh()


class Clipped(nn.Module):
    def forward(self, x):
        return x.clamp(-1, 1)


def own(data=None, size=8, **options):
    return Loader(TensorDataset(X, Y) if data is None else data, size, **{"seed": 3, **options})


def built(
    squash=nn.Tanh,
    drop=0.2,
    momentum=0.1,
    last=(),
    own_layer=Squashed,
    frozen=False,
    strides=(6, 1),
    optimizer=torch.optim.SGD,
    loss=nn.CrossEntropyLoss,
    loader=own,
    **options,
):
    """Return what a script makes when it starts; `settings` are the optimizer's."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8, momentum=momentum)
    layers = nn.Linear(6, 8), squash(), nn.Dropout(drop), norm, own_layer(), nn.Linear(8, 3), *last
    model = nn.Sequential(*layers).float()
    model[0].requires_grad_(not frozen)
    weight = torch.empty_strided((8, 6), strides, dtype=torch.float32)
    model[0].weight.data = weight.copy_(model[0].weight.data)
    settings = options.pop("settings", {"lr": 0.1, "momentum": 0.9})
    options = {"devices": 1, **options}
    return (model, optimizer(model.parameters(), **settings), loss()), loader(), options


def train(trainer, loader, steps):
    with trainer:
        while trainer.steps_done < steps:
            for batch in trainer.epoch(loader):
                trainer.step(*batch)
                if trainer.steps_done == steps and steps % 5:  # else the epoch ends by itself
                    break
    return trainer.fingerprint()


def save(folder, at=SAVED_AT, **changed):
    given, loader, options = built(**changed)
    trainer = evenstep.Trainer(*given, **grouped(shards=4, **options))
    train(trainer, loader, at)
    trainer.save(folder)


def resumed(folder, caplog, steps=STEPS, **changed):
    """Return the fingerprint of the resumed training, `within_rounding`, and what was logged."""
    given, loader, options = built(**changed)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "evenstep"):
        trainer = evenstep.Trainer.load(folder, *given, **grouped(**options))
        found = train(trainer, loader, steps)
    return found, trainer.within_rounding, caplog.messages


def of_torch(data=None, size=8, **options):
    return DataLoader(TensorDataset(X, Y) if data is None else data, size, shuffle=True, **options)


def swapped():
    return Items(order=[*range(20, 40), *range(20)])


LOADERS = {"own": own, "own, of items": lambda: own(Items()), "torch's": lambda: of_torch(Items())}

REFUSED = {  # fact: what has changed, and what the error names
    "the number of shards": ({"shards": 8}, "shards 8 instead of 4"),
    "the seed": ({"seed": 1}, "seed 1 instead of 0"),
    "the precision": ({"precision": "bf16"}, "precision bf16 instead of fp32"),
    "the threads of a device": ({"threads": 2}, "threads 2 instead of 1"),
    "a layer's class": ({"squash": nn.ReLU}, r"layer 1 ReLU\(.*\) instead of Tanh\(\)"),
    "the rate of dropout": ({"drop": 0.3}, r"layer 2 Dropout\(p=0\.3.*instead of Dropout\(p=0\.2"),
    "the momentum of batch norm": ({"momentum": 0.2}, r"layer 3 .*momentum=0\.2.*momentum=0\.1"),
    "one more layer without parameters": ({"last": [nn.Sigmoid()]}, r"layer 6 Sigmoid\(\) instead"),
    "a layer of one's own": ({"own_layer": Clipped}, r"layer 4 Clipped\(\) instead of Squashed"),
    "a frozen parameter": ({"frozen": True}, r"requires_grad of 0\.weight False instead of True"),
    "the optimizer": (
        {"optimizer": torch.optim.Adam, "settings": {"lr": 0.1}},
        r"torch\.optim\.adam\.Adam instead of torch\.optim\.sgd\.SGD",
    ),
    "a setting of the optimizer": (
        {"settings": {"lr": 0.1, "momentum": 0.5}},
        r"momentum of the optimizer 0\.5 instead of 0\.9",
    ),
    "a setting of the loss": (
        {"loss": lambda: nn.CrossEntropyLoss(label_smoothing=0.1)},
        r"label_smoothing=0\.1.* instead of .*label_smoothing=0\.0",
    ),
    "the weights of the classes": (
        {"loss": lambda: nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 1.0]))},
        "the digest of loss weight",
    ),
}
SAID = {  # a line, and `within_rounding`: (change, undo), and what the line names
    "the default dtype": (
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_dtype(torch.float32),
        "the default dtype torch.float64 instead of torch.float32",
    ),
    "the precision of products": (
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_float32_matmul_precision("highest"),
        "the float32 precision",
    ),
    "denormal numbers": (
        lambda: torch.set_flush_denormal(True),
        lambda: torch.set_flush_denormal(False),
        "the treatment of denormal numbers flushed instead of kept",
    ),
    "the kernels of attention": (
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        lambda: torch.backends.cuda.enable_flash_sdp(True),
        "the kernels of scaled_dot_product_attention",
    ),
}
REWRITTEN = {  # facts of another machine, played by the checkpoint: what it has instead
    "the version of torch": "2.6.0 (1eba9b3aa3c4)",
    "the version of oneDNN": "2.7.3",
    "the C library": "glibc 2.31",
    "the kinds of devices": "cuda (NVIDIA H100)",
}
DATA = {  # in the middle of an epoch: what has changed, and what the error names
    "the batch size": ({"size": 20}, "batch_size 20 instead of 8|gives other batches"),
    "the length of the data set": (
        {"data": lambda: Items(examples=39)},
        "its examples 39 instead of 40",
    ),
    "the contents of the data set": (
        {"data": lambda: Items(factor=2.0)},
        "a digest of some examples",
    ),
    "the order of the files": ({"data": swapped}, "a digest of some examples"),
}
FREE = {  # nothing: the bits of an uninterrupted training
    "the number of devices": {"devices": 2},
    "devices with memory of their own": {"devices": ["cpu:0:own", "cpu:1:own"]},
    "steps in flight": {"max_in_flight": 2},
    "worker processes": {"loader": lambda: own(num_workers=2)},
    "a function as the loss": {"loss": lambda: nn.functional.cross_entropy},
}


IN_THE_MIDDLE = ", in the middle of an epoch"
SETTINGS = dict.fromkeys(
    ["the CPU capability", "the memory format of a weight"], "within rounding"
) | {
    "a setting of a library that moves bits": "within rounding",
    "a setting of a library that moves no bit here": "the same bits",
}
TABLE = {
    **dict.fromkeys(REFUSED, "refused"),
    **{f"{fact}{IN_THE_MIDDLE}": "refused" for fact in [*DATA, "a different kind of loader"]},
    "other data at the start of an epoch": "said",
    "the seed of Python's hashes": "said",  # tests/checkpoint/test_saved_hash_seed.py
    **dict.fromkeys([*SAID, *REWRITTEN], "within rounding"),
    **SETTINGS,
    **dict.fromkeys(FREE, "the same bits"),
}


def test_the_page_has_this_table():
    page = (Path(__file__).parents[2] / "docs" / "promise.md").read_text()
    _, _, rows = page.partition("| changed since the checkpoint | the resume |\n|---|---|\n")
    rows, _, _ = rows.partition("\n\n")
    assert len(TABLE) >= 20
    assert dict(row[2:-2].split(" | ") for row in rows.splitlines()) == TABLE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in the middle of an epoch."""
    out = tmp_path_factory.mktemp("saved")
    save(out)
    return out


@pytest.fixture(scope="module")
def uninterrupted():
    given, loader, options = built()
    return train(evenstep.Trainer(*given, **grouped(shards=4, **options)), loader, STEPS)


@pytest.mark.parametrize("fact", REFUSED)
def test_another_training_is_refused_by_name(folder, caplog, fact):
    changed, named = REFUSED[fact]
    with pytest.raises(EvenstepError, match=named):
        resumed(folder, caplog, **changed)


@pytest.mark.parametrize("fact", SAID)
def test_other_arithmetic_is_said_once_and_stays_within_rounding(folder, tmp_path, caplog, fact):
    change, undo, named = SAID[fact]
    with contextlib.ExitStack() as stack:
        stack.callback(undo)
        change()
        given, loader, options = built()
        with caplog.at_level(logging.WARNING, "evenstep"):
            trainer = evenstep.Trainer.load(folder, *given, **grouped(**options))
            train(trainer, loader, 3)
        trainer.save(tmp_path)
        (line,) = caplog.messages
        assert named in line
        assert line.endswith("results are equal within rounding, not bit for bit")
        assert trainer.within_rounding
        _, within, lines = resumed(tmp_path, caplog, 4)
    assert within
    assert not [line for line in lines if named in line]  # it was saved with these


def test_another_memory_format_of_a_weight_is_said_and_stays_within_rounding(folder, caplog):
    _, within, (line,) = resumed(folder, caplog, strides=(1, 8))
    assert "here strides of 0.weight (1, 8) instead of contiguous" in line
    assert within


@pytest.mark.parametrize("fact", REWRITTEN)
def test_another_machine_is_said_once(tmp_path, caplog, fact):
    save(tmp_path)

    def change(tree):
        tree["facts"]["arithmetic"][fact] = REWRITTEN[fact]

    rewritten(tmp_path, change)
    _, within, lines = resumed(tmp_path, caplog)
    (line,) = lines
    assert f"{fact} " in line
    assert f"instead of {REWRITTEN[fact]}" in line
    assert within


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("fact", DATA)
def test_other_data_in_the_middle_of_an_epoch_are_refused_by_name(tmp_path, caplog, kind, fact):
    save(tmp_path, loader=LOADERS[kind])
    options, named = DATA[fact]
    made = {name: one() if callable(one) else one for name, one in options.items()}
    make = of_torch if kind == "torch's" else own
    given = {"data": Items(), **made}
    if kind == "own":
        data = given["data"]
        given["data"] = TensorDataset(*map(torch.stack, zip(*data, strict=True)))
    with pytest.raises(EvenstepError, match=named):
        resumed(tmp_path, caplog, loader=lambda: make(**given))


@pytest.mark.parametrize("now", LOADERS)
@pytest.mark.parametrize("then", LOADERS)
def test_another_kind_of_loader_in_the_middle_of_an_epoch_is_refused(tmp_path, caplog, then, now):
    save(tmp_path, loader=LOADERS[then])
    if then == now:
        assert not resumed(tmp_path, caplog, loader=LOADERS[now])[1]
        assert not caplog.messages
        return
    with pytest.raises(EvenstepError, match=r"the loader|the data set|other batches"):
        resumed(tmp_path, caplog, loader=LOADERS[now])


@pytest.mark.parametrize("options", [{"seed": 4}, {"shuffle": False}, {"drop_last": True}], ids=str)
def test_another_order_of_the_own_loader_is_refused(folder, caplog, options):
    (name,) = options
    with pytest.raises(EvenstepError, match=name):
        resumed(folder, caplog, loader=lambda: own(**options))


def test_other_data_at_the_start_of_an_epoch_are_said(tmp_path, caplog):
    save(tmp_path, at=5)
    _, within, lines = resumed(tmp_path, caplog, loader=lambda: own(size=10))
    (line,) = lines
    assert "batch_size 10 instead of 8" in line
    assert not within


@pytest.mark.parametrize("fact", FREE)
def test_what_the_bits_do_not_depend_on_may_change(folder, caplog, uninterrupted, fact):
    assert resumed(folder, caplog, **FREE[fact]) == (uninterrupted, False, [])


def test_a_checkpoint_of_an_older_version_loads_as_before(tmp_path, caplog):
    """It has neither the facts, nor the place in the own loader."""
    save(tmp_path)
    rewritten(tmp_path, lambda tree: [tree.pop(key) for key in ("facts", "data")])
    changed = {"squash": nn.ReLU, "loader": lambda: own(Items(factor=2.0))}
    assert resumed(tmp_path, caplog, **changed)[1:] == (False, [])


PROGRAM = """
import logging, sys
sys.path[:0] = sys.argv[1:3]
import test_resumed_facts as facts, evenstep
logging.basicConfig(format="%(message)s")
given, loader, options = facts.built()
trainer = evenstep.Trainer.load(sys.argv[3], *given, **options)
facts.train(trainer, loader, facts.STEPS)
print(trainer.within_rounding)
"""


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            {"ATEN_CPU_CAPABILITY": "default"},
            "the CPU capability DEFAULT instead of",
        ),
        ({"MKL_CBWR": "COMPATIBLE"}, "MKL_CBWR COMPATIBLE instead of not set"),
        (
            {
                "ONEDNN_MAX_CPU_ISA": "ALL",
                "MKL_ENABLE_INSTRUCTIONS": "AVX512",
                "OPENBLAS_CORETYPE": "Zen",
            },
            None,
        ),
    ],
    ids=str,
)
@pytest.mark.slow
def test_a_setting_of_libraries_counts_where_it_moves_a_bit(folder, settings, named):
    here = Path(__file__).parent
    given = "-c", PROGRAM, here, here.parent / "support", folder
    # Settings that the tests run with themselves, to compute as another processor, stay.
    env = {**os.environ, **settings} if named else {**settings, **os.environ}
    finished = run(*given, env=env, fresh=True)
    lines = finished.stderr.splitlines()
    if named is None:
        assert (finished.stdout, lines) == ("False\n", [])
    else:
        assert finished.stdout == "True\n", finished.stderr
        assert [named in line for line in lines] == [True]
