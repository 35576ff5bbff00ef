"""The training state: what may be in a checkpoint, and what is refused in one line."""

import contextlib
import dataclasses
import functools
import json

import pytest
import torch
from torch import nn

import evenstep
from evenstep.checkpoint import async_writer, files
from evenstep.checkpoint.codec import encode
from evenstep.checkpoint.files import read_checkpoint, write_checkpoint
from evenstep.checkpoint.training_state import (
    ModelState,
    TrainingState,
    read_training_state,
)
from evenstep.data import Cursor
from evenstep.devices.addresses import row_major
from evenstep.errors import CheckpointError
from evenstep.options.experiment import Experiment
from marks import slow
from odd_values import places, put
from zoo import build, make_batches

LOSS = nn.CrossEntropyLoss()


def parts(name="batch_norm"):
    model = build(name)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """What a trainer with a scheduler saves."""
    folder = tmp_path_factory.mktemp("run")
    model, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with evenstep.Trainer(
        model, optimizer, LOSS, scheduler=scheduler, devices=1, shards=4, seed=6
    ) as trainer:
        trainer.step(*make_batches((20,))[0])
        trainer.save(folder)
    return read_checkpoint(folder)


def changed(tree, key, value):
    """Return a copy of nested dicts with another value for a key such as "a.b", or without it."""
    name, _, rest = key.partition(".")
    if rest:
        return {**tree, name: changed(tree[name], rest, value)}
    without = {other: item for other, item in tree.items() if other != name}
    return without if value is MISSING else {**without, name: value}


MISSING = object()


WHERE_NEEDED = {  # fields that a checkpoint has only where they say something
    "seeds_at",  # it is not the cursor
    "within_rounding",  # it is true
    "data",  # with trainer.epoch
    "user_state",  # with Trainer(state=...)
    "cut_by_time",  # with stages that were chosen by time
}
ALL_KEYS = [field.name for field in dataclasses.fields(TrainingState)]
KEYS_OF_ALL = [name for name in ALL_KEYS if name not in WHERE_NEEDED]


def test_a_state_becomes_a_tree_and_a_state_again(tree, tmp_path):
    state = TrainingState.from_tree(tree, tmp_path)
    assert state.experiment == Experiment(shards=4, seed=6)
    assert state.cursor == Cursor(0, 1)
    assert (state.steps_done, state.compiles) == (1, None)
    assert state.model.parameters.keys() == dict(parts()[0].named_parameters()).keys()
    assert len(state.fingerprint) == 64
    assert list(state.to_tree()) == list(tree)
    assert encode(state.to_tree()).plain == encode(tree).plain


def test_the_keys_of_a_checkpoint_are_the_documented_fields(tree):
    assert list(tree) == KEYS_OF_ALL
    own = [field.name for field in dataclasses.fields(ModelState)]
    own.remove("slices")  # only where layers are cut into slices
    assert list(tree["model"]) == own


LATER = {"optimizers", "facts", "hash_seed"}  # which earlier versions did not write
NEEDED = [key for key in KEYS_OF_ALL if key not in LATER]
KEYS = [*NEEDED, "cursor.epoch", "cursor.step", "model.parameters", "model.buffers"]


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key_is_named(tree, tmp_path, key):
    assert refusal(tmp_path, changed(tree, key, MISSING)) == f"it lacks the key {key}"


def test_an_option_that_an_older_version_did_not_have_has_its_default(tree, tmp_path):
    state = TrainingState.from_tree(changed(tree, "experiment.batch_norm", MISSING), tmp_path)
    assert state.experiment.batch_norm == "shard"
    assert state.experiment.shards == 4


def test_compile_is_saved_as_version_0_1_0_named_it(tree):
    """So that checkpoints can be read by either version."""
    assert tree["experiment"]["hybridize"] is False
    assert "compile" not in tree["experiment"]


LATER_FIELDS = [field for field in dataclasses.fields(Experiment) if field.metadata]
FIRST_KEYS = ["shards", "seed", "precision", "memory_format", "threads", "hybridize", "batch_norm"]


def test_a_checkpoint_has_the_keys_of_version_0_1_0(tree):
    """Options that are newer are left out where they have their defaults."""
    assert list(tree["experiment"]) == FIRST_KEYS
    assert [field.name for field in LATER_FIELDS] == list(dataclasses.asdict(Experiment()))[7:]


def test_a_newer_option_is_saved_where_it_is_used(tree, tmp_path):
    state = TrainingState.from_tree(tree, tmp_path)
    used = dataclasses.replace(state, experiment=Experiment(batch_dim=1))
    saved = used.to_tree()
    assert list(saved["experiment"]) == [*FIRST_KEYS, "batch_dim"]
    assert TrainingState.from_tree(saved, tmp_path) == used


UNKNOWN = ["extra", "loss", "self", "__class__", "cursor.extra", "model.more"]
UNKNOWN += ["experiment.extra", "experiment.callbacks", "experiment.__class__"]


@pytest.mark.parametrize("key", UNKNOWN)
def test_an_unknown_key_is_named(tree, tmp_path, key):
    assert refusal(tmp_path, changed(tree, key, 1)) == f"it has the unknown key {key}"


TYPES = [
    ("experiment", 3, "3", "dict"),
    ("experiment.shards", "8", "'8'", "int"),
    ("experiment.shards", True, "True", "int"),
    ("experiment.hybridize", 1, "1", "bool"),
    ("experiment.precision", "fp8", "'fp8'", "one of fp32, bf16"),
    ("experiment.precision", torch.ones(2), "Tensor", "one of fp32, bf16"),
    ("cursor", None, "None", "dict"),
    ("cursor.step", 1.5, "1.5", "int"),
    ("steps_done", None, "None", "int"),
    ("steps_done", "many", "'many'", "int"),
    ("compiles", "yes", "'yes'", "bool"),
    ("model", [], "list", "dict"),
    ("model.buffers", None, "None", "dict"),
    ("optimizer", None, "None", "dict"),
    ("scheduler", (1,), "tuple", "dict"),
    ("fingerprint", 5, "5", "str"),
    ("seeds_at", 3, "3", "dict"),
    ("model.extra", 1, "1", "dict"),
    ("optimizers", "Adam", "'Adam'", "dict"),
    ("within_rounding", 1, "1", "bool"),
    ("data", [], "list", "dict"),
    ("user_state", 3, "3", "dict"),
]
WRONG = [
    *((key, value, f"{key} is {got}, but {needed} is needed") for key, value, got, needed in TYPES),
    ("experiment.shards", 0, "got shards=0: give an integer from 1 to 65536"),
    ("cursor.step", -1, "got Cursor(epoch=0, step=-1): epoch and step count from 0"),
    ("model.parameters", {"w": 1}, "model.parameters.w is 1, but Tensor is needed"),
    ("optimizers", {"": "Adam"}, "optimizers. is 'Adam', but dict is needed"),
    ("optimizers", {"": {"name": "Adam"}}, "it lacks the key optimizers..defaults"),
    ("optimizers", {"": {"name": 3, "defaults": {}}}, "optimizers..name is 3, but str is needed"),
    ("data", {"loader": "list"}, "it lacks the key data.epoch"),
    ("cut_by_time", {"0": "1"}, "cut_by_time.0 is '1', but int is needed"),
]


@pytest.mark.parametrize(("key", "value", "problem"), WRONG)
def test_a_value_of_another_type_is_named(tree, tmp_path, key, value, problem):
    assert refusal(tmp_path, changed(tree, key, value)) == problem


def refusal(folder, tree):
    """Return what is said of a checkpoint that holds `tree`, without where it is."""
    write_checkpoint(folder, encode(tree), step=1)
    model, optimizer = parts()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(CheckpointError) as caught:
        evenstep.Trainer.load(folder, model, optimizer, LOSS, devices=1)
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
    with pytest.raises(CheckpointError):
        read_training_state(folder)
    begin = f"the training state in {folder} can't be used: "
    end = "; it is damaged, or a different version of evenstep wrote it"
    text = str(caught.value)
    assert text.startswith(begin)
    assert text.endswith(end)
    assert "\n" not in text
    return text[len(begin) : -len(end)]


@pytest.mark.parametrize("other", [None, 3, [1, 2], {}, {"weights": torch.ones(2)}], ids=str)
def test_a_checkpoint_of_something_else_is_refused(tmp_path, other):
    write_checkpoint(tmp_path, encode(other), step=1)
    with pytest.raises(CheckpointError, match="holds a checkpoint, but not of a trainer: give a"):
        read_training_state(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.state", 1),
        ("optimizer.state", MISSING),
        ("optimizer.state", {0: 3}),
        ("optimizer.param_groups", None),
        ("optimizer.param_groups", [{}]),
        ("optimizer.param_groups", MISSING),
    ],
    ids=lambda value: "missing" if value is MISSING else str(value),
)
def test_a_malformed_optimizer_is_refused(tree, tmp_path, key, value):
    write_checkpoint(
        tmp_path, encode(changed(changed(tree, "scheduler", None), key, value)), step=1
    )
    with pytest.raises(
        CheckpointError, match="of a different optimizer than Adam with 1 parameter gr"
    ):
        evenstep.Trainer.load(tmp_path, *parts(), LOSS, devices=1)


@pytest.mark.parametrize("background", [False, True])
def test_a_state_is_encoded_once(tmp_path, monkeypatch, background):
    calls = []
    really = async_writer.encode
    monkeypatch.setattr(async_writer, "encode", lambda *given: calls.append(1) or really(*given))
    with evenstep.Trainer(*parts(), LOSS, devices=1) as trainer:
        trainer.step(*make_batches((20,))[0])
        trainer.save(tmp_path, background=background)
        expected = trainer.fingerprint()
    assert calls == [1]
    assert read_training_state(tmp_path).fingerprint == expected


TENSORS = {
    "contiguous": torch.arange(6.0).reshape(2, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "channels last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "slice": torch.arange(9.0)[2:5],
    "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "empty": torch.zeros(0, 3),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_copy_has_the_values_and_memory_of_its_own(name):
    tensor, copies = TENSORS[name], async_writer._Copies()
    copy = copies(tensor)
    assert torch.equal(copy, tensor)
    assert copy.is_contiguous()
    assert not copy.numel() or copy.untyped_storage().data_ptr() != (
        tensor.untyped_storage().data_ptr()
    )
    assert copies(tensor.detach()) is copy


def test_tensors_that_differ_only_in_how_memory_is_read_have_copies_of_their_own():
    values = torch.tensor([[1 + 2j, 3 - 4j], [5j, 6]])
    views = [values, values.conj(), values.t(), values[:1], values[:, :1], values.view_as(values)]
    copies = async_writer._Copies()
    assert all(torch.equal(copies(view), view) for view in views)
    assert len({id(copies(view)) for view in views}) == len(views) - 1


def test_a_tensor_that_is_in_row_major_order_already_is_not_copied():
    tensor = TENSORS["contiguous"]
    assert row_major(tensor).data_ptr() == tensor.data_ptr()


# ---- a manifest that was tampered with, and sealed again


def a_tensor(**changed):
    weight = {"name": "model/parameters/0.weight", "dtype": "float32"}
    return {"$tensor": {**weight, "shape": [4, 1, 3, 3], "strides": [9, 9, 3, 1], **changed}}


ODD_VALUES = {
    "null": None,
    "true": True,
    "negative": -1,
    "fraction": 0.5,
    "text": "x",
    "path": "../../../etc/passwd",
    "empty list": [],
    "empty object": {},
    "deep list": functools.reduce(lambda inner, _: [inner], range(150), 1),
    "deep object": functools.reduce(lambda inner, _: {"a": inner}, range(150), 1),
    "unknown marker": {"$object": "os.system"},
    "two markers": {"$int": "1", "$float": "0"},
    "no hexadecimals": {"$int": "many"},
    "a float of two bytes": {"$float": "0000"},
    "a list as a key": {"$dict": [[[], 1]]},
    "pairs of three": {"$dict": [[1, 2, 3]]},
    "no text": {"$str": "ff"},
    "a tensor that is missing": a_tensor(name="../x", shape=[], strides=[]),
    "a tensor of terabytes": a_tensor(shape=[1 << 40], strides=[1]),
    "a tensor of no dtype": a_tensor(dtype="__name__"),
    "a tensor of negative strides": a_tensor(strides=[-9, 9, 3, 1]),
}


def odd_names(*at_once):
    """Return the names of all odd values, of which some are for the fast tests."""
    return [name if name in at_once else slow(name) for name in ODD_VALUES]


def seal(folder, manifest):
    body = files._spell_fields({key: manifest[key] for key in manifest if key != "sha256"})
    (folder / "manifest.json").write_bytes(files._seal(body))


@pytest.fixture(scope="module")
def forged(tree, tmp_path_factory):
    """A checkpoint of one step, and its manifest."""
    folder = write_checkpoint(tmp_path_factory.mktemp("forged"), encode(tree), step=1)
    return folder, json.loads((folder / "manifest.json").read_text())


def load_forged(folder):
    model, optimizer = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return evenstep.Trainer.load(folder, model, optimizer, LOSS, scheduler=scheduler, devices=1)


@pytest.mark.parametrize("name", odd_names("null", "a tensor of terabytes"))
def test_an_odd_value_anywhere_in_a_manifest_is_refused_or_is_a_value(forged, name):
    """Settings of the optimizer and the scheduler may be any value: what these do is theirs."""
    folder, manifest = forged
    refused = []
    for path in places(manifest):
        seal(folder, put(manifest, path, ODD_VALUES[name]))
        try:
            read_training_state(folder)
        except CheckpointError:
            refused.append(path)
    needed = {("state",), ("state", "cursor"), ("files",)}
    assert needed <= {*refused}


@pytest.mark.parametrize(("name", "each"), [("null", 7), *(slow(name, 1) for name in ODD_VALUES)])
def test_an_odd_value_in_what_is_restored_is_refused_or_is_a_value(forged, name, each):
    """At each place, or at each seventh."""
    folder, manifest = forged
    parts = ("optimizer", "optimizers", "scheduler", "model")
    paths = [(part, *path) for part in parts for path in places(manifest["state"][part])]
    for path in paths[::each]:
        seal(folder, put(manifest, ("state", *path), ODD_VALUES[name]))
        with contextlib.suppress(CheckpointError):
            load_forged(folder)


def test_the_items_of_a_list_are_checked_too(forged):
    folder, manifest = forged
    seal(folder, put(manifest, ("state", "model", "frozen"), ["0.weight", ["0.bias"]]))
    with pytest.raises(CheckpointError, match=r"model\.frozen\[1\] is list, but str is needed"):
        load_forged(folder)
