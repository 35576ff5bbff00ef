"""Batches as people have them: mappings, dataclasses, named tuples, constants, keywords."""

import collections
import dataclasses
import functools
from types import MappingProxyType
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import evenstep
from evenstep.batch import cut_batch
from evenstep.batch.nesting import Keywords, Nesting, nest
from evenstep.errors import BatchError, ModelError
from layouts import own
from trainers import open_trainer

X = torch.arange(24.0).reshape(6, 4)
Y = torch.arange(6) % 3


class Encoding(collections.UserDict):
    """As tokenizers give them."""


@dataclasses.dataclass
class Graphs:
    nodes: torch.Tensor
    kind: str = "none"
    labels: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    nodes: torch.Tensor


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


def second_shard(batch):
    """Return the second of three shards."""
    return cut_batch(nest(batch), 3).take(1, torch.clone)


def same(ours, theirs):
    return torch.equal(ours, theirs) and not torch.equal(ours, X[:2])


@pytest.mark.parametrize(
    "mapping",
    [Encoding(a=X, n=2), MappingProxyType({"a": X, "n": 2}), collections.OrderedDict(a=X, n=2)],
    ids=["user dict", "proxy", "ordered"],
)
def test_a_mapping_becomes_a_dict(mapping):
    shard = second_shard((mapping, Y))
    assert dict(shard[0]).keys() == {"a", "n"}
    assert same(shard[0]["a"], X[2:4])
    assert shard[0]["n"] == 2
    assert shard[1].tolist() == [2, 0]


def test_a_dataclass_stays_one():
    shard = second_shard(Graphs(X, "dense", labels={"y": Y}))
    assert type(shard) is Graphs
    assert same(shard.nodes, X[2:4])
    assert shard.kind == "dense"
    assert shard.labels["y"].tolist() == [2, 0]
    assert same(second_shard(Frozen(X)).nodes, X[2:4])


def test_named_tuples_and_what_is_nested():
    shard = second_shard({"a": [Pair(X, Encoding(y=Y, none=None))]})
    assert same(shard["a"][0].left, X[2:4])
    assert shard["a"][0].right["y"].tolist() == [2, 0]
    assert shard["a"][0].right["none"] is None


@pytest.mark.parametrize("constant", [3, 0.5, True, "text", b"bytes", 2j, None], ids=repr)
def test_constants_go_to_every_shard(constant):
    assert second_shard((X, constant))[1] == constant
    assert second_shard((X, {"a": [constant]}))[1]["a"] == [constant]


ONE_EACH = {
    "names": ({"names": ["a", "b", "c", "d", "e", "f"]}, r"batch\[1\]\['names'\] is a list of 6"),
    "numbers": ((1, 2.0, 3, 4, 5, 6), r"batch\[1\] is a tuple of 6 values of type int"),
    "tensors": ([X + number for number in range(6)], r"batch\[1\] is a list of 6 tensors"),
    "inside": ({"crops": [Y] * 6}, r"batch\[1\]\['crops'\] is a list of 6 tensors"),
}


def first_rows(part, examples):
    return optree.tree_map(lambda one: one[:examples] if torch.is_tensor(one) else one, part)


@pytest.mark.parametrize(("part", "message"), ONE_EACH.values(), ids=ONE_EACH)
def test_a_list_as_long_as_the_first_batch_is_refused(part, message):
    with pytest.raises(BatchError, match=message + ".* in a batch of 6 examples"):
        Nesting(0)((X, part))


@pytest.mark.parametrize(("part", "message"), ONE_EACH.values(), ids=ONE_EACH)
def test_a_list_that_once_was_of_another_length_never_is(part, message):
    nested = Nesting(0)
    nested((X[:5], first_rows(part, 5)))
    nested((X, part))
    with pytest.raises(BatchError, match=r"batch\[2\] is a list"):  # at another place
        nested((X, part, ["a"] * 6))


def test_a_tuple_of_tensors_is_cut_whatever_its_length():
    batch = (X, tuple(X + number for number in range(6)))
    shard = cut_batch(Nesting(0)(batch), 3).take(1, torch.clone)
    assert [one.tolist() for one in shard[1]] == [(X + n)[2:4].tolist() for n in range(6)]


def test_micro_batches_hold_any_lists():
    own_shards = evenstep.Shards([(X, [1, 2, 3, 4, 5, 6]), (X[:2], [X, X[:2]])])
    cut = own_shards.cut_alone((own_shards,), 2)
    assert cut.take(0, torch.clone)[1] == [1, 2, 3, 4, 5, 6]
    assert [len(one) for one in cut.take(1, torch.clone)[1]] == [6, 2]


def test_what_is_neither_is_still_named():
    with pytest.raises(BatchError, match=r"batch\[1\] is of type object"):
        cut_batch(nest((X, object())), 3)


def test_a_batch_that_holds_itself_is_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(BatchError, match="nested too deeply"):
        Nesting(0)((X, endless))


def test_keywords_stay_apart():
    shard = second_shard((X, Keywords(y=Y, scale=2.0)))
    assert isinstance(shard[1], Keywords)
    assert shard[1]["y"].tolist() == [2, 0]
    assert shard[1]["scale"] == 2.0


# ---- in a trainer


class Model(nn.Module):
    """Called with a batch's fields, as models of transformers are."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, x, labels, scale=1.0, mode=None):
        assert mode in (None, "sum")
        loss = scale * F.cross_entropy(self.body(x), labels)
        return collections.namedtuple("Output", "loss")(loss)


def by_name(model, **batch):
    return model(**batch).loss * len(batch["x"]), len(batch["x"])


def whole(model, batch):
    return by_name(model, **batch)


def of_fields(model, graphs):
    return by_name(model, x=graphs.nodes, labels=graphs.labels)


BATCH = {"x": torch.randn(20, 4, generator=torch.Generator().manual_seed(0))}
BATCH["labels"] = torch.arange(20) % 3

WAYS = {
    "keywords": (by_name, lambda trainer: trainer.step(**BATCH)),
    "encoding": (by_name, lambda trainer: trainer.step(**Encoding(BATCH))),
    "mapping": (whole, lambda trainer: trainer.step(Encoding(BATCH))),
    "dataclass": (
        of_fields,
        lambda trainer: trainer.step(Graphs(BATCH["x"], labels=BATCH["labels"])),
    ),
    "constants": (by_name, lambda trainer: trainer.step(**BATCH, scale=1.0, mode="sum")),
    "backward": (by_name, lambda trainer: in_two_calls(trainer)),
}


def in_two_calls(trainer):
    loss = trainer.backward(**BATCH)
    trainer.optimizer.step()
    return loss


def opened(objective, **options):
    torch.manual_seed(0)
    return open_trainer(Model(), objective=objective, **options)


def trained(way, **options):
    objective, step = WAYS[way]
    with opened(objective, **options) as trainer:
        losses = [float(step(trainer)) for _ in range(3)]
        return trainer.fingerprint(), losses


@functools.cache
def reference():
    def objective(model, X, y):
        return F.cross_entropy(model.body(X), y) * len(X), len(X)

    with opened(objective, devices=1) as trainer:
        losses = [float(trainer.step(BATCH["x"], BATCH["labels"])) for _ in range(3)]
        return trainer.fingerprint(), losses


@pytest.mark.parametrize(("devices", "in_flight"), [(1, 1), (2, 2), (own(2), 1)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_each_way_trains_the_same(way, devices, in_flight):
    assert trained(way, devices=devices, max_in_flight=in_flight) == reference()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_short_batch_as_long_as_a_list_is_trained(devices):
    def objective(model, X, y, scales, crops):
        loss = F.cross_entropy(model.body(X + sum(crops)), y, reduction="sum")
        return loss * sum(scales), len(y)

    with opened(objective, devices=devices) as trainer:
        for examples in (6, 3, 2):
            batch = X[:examples], Y[:examples], [0.5, 0.25, 0.25], [X[:examples]] * 2
            trainer.step(*batch)
            trainer.evaluate([batch], {"loss": objective})
        assert trainer.steps_done == 3


@pytest.mark.slow
def test_compiled_shards_follow_a_constant():
    losses = []
    for compile_ in (False, True):
        with opened(by_name, devices=1, compile=compile_) as trainer:
            losses.append([float(trainer.step(**BATCH, scale=scale)) for scale in (1.0, 3.0)])
    torch.testing.assert_close(*map(torch.tensor, losses))
    assert losses[0][1] > 2 * losses[0][0]


def test_cross_entropy_needs_a_target_without_a_name():
    message = "got a batch of 2 parts, of which x, labels go to the model: give"
    with open_trainer(nn.Linear(4, 3)) as trainer, pytest.raises(ModelError, match=message):
        trainer.step(**BATCH)


def test_evaluation_takes_mappings_and_constants():
    def metric(model, batch):
        assert batch["mode"] == "sum"
        return by_name(model, **batch)

    batches = [Encoding(**BATCH, mode="sum")]
    found = []
    for devices in (1, 3):
        with opened(whole, devices=devices) as trainer:
            found.append(trainer.evaluate(batches, {"loss": metric}))
    assert found[0] == found[1]
