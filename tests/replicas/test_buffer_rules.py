"""What becomes of buffers that shards write: by a rule, or refused where none can be known."""

import pytest
import torch
from torch import nn

import evenstep
from evenstep.errors import ContractError, InputError
from layouts import own
from reference import assert_same_bits
from trainers import open_trainer, sgd, state_of

X = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))  # 4 or 3 examples a shard
Y = torch.arange(30) % 3

LAYOUTS = {"one device": 1, "two devices": 2, "own memory": own(3)}
everywhere = pytest.mark.parametrize("devices", LAYOUTS.values(), ids=LAYOUTS)


class Writing(nn.Module):
    """Has `write(module, x)` write its buffer in every shard."""

    def __init__(self, buffer, write):
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(6, 3)
        self.register_buffer("state", buffer)
        self.write = write

    def forward(self, x):
        if self.training:
            self.write(self, x)
        return self.head(x)


def fill_rows(module, x):
    """What a queue of keys does: every shard writes the same rows."""
    module.state[: len(x)] = x


def count_examples(module, x):
    module.state += len(x)


def follow_mean(module, x):
    module.state.lerp_(x.mean(0), 0.5)


def train(module, steps=2, **options):
    with open_trainer(module, **options) as trainer:
        for _ in range(steps):
            trainer.step(X, Y)
        return state_of(trainer)


@everywhere
@pytest.mark.parametrize(
    ("buffer", "write", "found"),
    [
        (torch.ones(16, 6), fill_rows, "in some places only"),
        (torch.tensor(0), count_examples, "a number that differs from shard to shard"),
    ],
    ids=["queue", "counter"],
)
@pytest.mark.parametrize("check", ["first", "off"])
def test_a_buffer_that_has_no_mean_is_refused(buffer, write, found, devices, check):
    module = Writing(buffer.clone(), write)
    with pytest.raises(ContractError, match=rf"the buffer state is .*{found}.*buffers="):
        train(module, devices=devices, check=check)
    assert torch.equal(module.state, buffer)


@everywhere
@pytest.mark.parametrize(
    ("rule", "expected"),
    [("sum", 2 * 30.0), ("first", 2 * 4.0), ("mean", 2 * (6 * 4 * 4 + 2 * 3 * 3) / 30)],
    ids=["sum", "first", "mean"],
)
def test_a_rule_for_a_counter(rule, expected, devices):
    """Two steps; six shards have 4 examples, two have 3."""
    module = Writing(torch.tensor(0.0), count_examples)
    state = train(module, devices=devices, buffers={"state": rule})
    assert module.state.item() == pytest.approx(expected, rel=1e-6)
    alone = train(Writing(torch.tensor(0.0), count_examples), devices=1, buffers={"state": rule})
    assert_same_bits(state, alone)


@everywhere
def test_an_integer_counter_sums_exactly(devices):
    module = Writing(torch.tensor(5), count_examples)
    train(module, devices=devices, buffers={"*": "sum"})
    assert module.state.item() == 5 + 2 * 30


@everywhere
def test_the_first_shard_fills_a_queue(devices):
    module = Writing(torch.ones(16, 6), fill_rows)
    train(module, devices=devices, buffers={"state": "first"})
    assert torch.equal(module.state[:4], X[:4])
    assert torch.equal(module.state[4:], torch.ones(12, 6))


@everywhere
def test_a_buffer_that_nothing_may_write(devices):
    with pytest.raises(ContractError, match="a shard has written the buffer state"):
        train(Writing(torch.zeros(6), follow_mean), devices=devices, buffers={"state": "refuse"})


@everywhere
def test_running_statistics_are_averaged_without_a_rule(devices):
    module = Writing(torch.zeros(6), follow_mean)
    train(module, steps=1, devices=devices)
    torch.testing.assert_close(module.state, 0.5 * X.mean(0))


@everywhere
def test_a_shard_that_leaves_a_buffer_alone_counts_with_its_opening_value(devices):
    """The mean is over all examples, also where only some shards have written."""
    opening, left = 4.0, 10.0
    shards = torch.tensor_split(X.double(), 8)
    writes = [bool(x[0, 0] > 0) for x in shards]
    assert any(writes)
    assert not all(writes)

    def write_some(module, x):
        if x[0, 0] > 0:
            module.state.fill_(left)

    module = Writing(torch.tensor(opening, dtype=torch.float64), write_some)
    train(module, steps=1, devices=devices, buffers={"state": "mean"})
    total = sum(len(x) * (left if one else opening) for x, one in zip(shards, writes, strict=True))
    assert float(module.state) == total / len(X)


@pytest.mark.parametrize("rule", ["sum", "first", "mean"])
def test_with_one_shard_a_buffer_is_what_the_module_wrote(rule):
    module, plain = (Writing(torch.full((6,), 0.1), follow_mean) for _ in range(2))
    train(module, steps=1, devices=1, shards=1, buffers={"state": rule})
    plain(X)
    assert torch.equal(module.state, plain.state)


def test_integer_buffers_that_all_shards_leave_alike_need_no_rule():
    def tick(module, x):
        module.state += 1

    module = Writing(torch.tensor(0), tick)
    train(module, devices=2)
    assert module.state.item() == 2


@pytest.mark.parametrize(
    ("buffers", "line"),
    [
        ({"stat": "mean"}, r"no such buffer: it has state"),
        ({"state": "median"}, r"buffers\['state'\]='median': choose one of mean, first, sum"),
    ],
    ids=["unknown name", "unknown rule"],
)
def test_a_wrong_rule_is_refused(buffers, line):
    with pytest.raises(InputError, match=line):
        train(Writing(torch.zeros(6), follow_mean), buffers=buffers)


def test_norm_layers_need_no_rule_even_where_a_channel_is_dead():
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with torch.no_grad():
        module[0].weight[0] = 0
        module[0].bias[0] = -1  # its channel is 0 in every example
    train(module, devices=2)
    spectral = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)))
    train(spectral, devices=2)


def test_rules_are_part_of_a_checkpoint(tmp_path):
    module = Writing(torch.tensor(0), count_examples)
    with open_trainer(module, buffers={"state": "sum"}) as trainer:
        trainer.step(X, Y)
        trainer.save(tmp_path)
    other = Writing(torch.tensor(0), count_examples)
    with evenstep.Trainer.load(tmp_path, other, sgd(other), nn.CrossEntropyLoss()) as trainer:
        assert trainer.experiment.buffers == {"state": "sum"}
        trainer.step(X, Y)
    assert other.state.item() == 60


class Observed(nn.Module):
    """Follows the range of its inputs, as observers of quantisation-aware training do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(6, 3)
        self.register_buffer("min_val", torch.full((), torch.inf))
        self.register_buffer("max_val", torch.full((), -torch.inf))

    def forward(self, x):
        self.min_val.copy_(torch.minimum(x.min(), self.min_val))
        self.max_val.copy_(torch.maximum(x.max(), self.max_val))
        return self.head(x)


@everywhere
@pytest.mark.parametrize("shards", [1, 8])
def test_max_and_min_are_those_of_the_whole_batch(devices, shards):
    module, rules = Observed(), {"min_val": "min", "max_val": "max"}
    train(module, devices=devices, shards=shards, buffers=rules)
    assert torch.equal(module.min_val, X.min())
    assert torch.equal(module.max_val, X.max())


@pytest.mark.parametrize(
    ("module", "rules"),
    [
        (Observed(), {"*": "refuse"}),
        (Writing(torch.zeros((), dtype=torch.int64), count_examples), {}),
    ],
)
def test_the_refusal_names_max_and_min(module, rules):
    with pytest.raises(ContractError, match="'max' or 'min'"):
        train(module, devices=1, buffers=rules)
