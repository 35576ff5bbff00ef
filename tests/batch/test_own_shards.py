"""`evenstep.Shards`: the user's own micro-batches are the shards, on any devices."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evenstep import Shards
from evenstep.errors import BatchError, ContractError
from layouts import own
from reference import assert_same_bits, whole_state
from trainers import open_trainer

LENGTHS = (7, 3, 12, 1, 5)


class Packed(nn.Module):
    """Pools sequences of any lengths, which lie behind one another in one tensor."""

    def __init__(self):
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, tokens, ends):
        hidden = self.drop(torch.tanh(self.body(tokens)))
        starts = [0, *ends[:-1]]
        pooled = [hidden[lo:hi].mean(0) for lo, hi in zip(starts, ends, strict=True)]
        return self.head(torch.stack(pooled))


def objective(model, tokens, ends, labels):
    scores = model(tokens, ends.tolist())
    loss = F.cross_entropy(scores, labels, reduction="sum")
    return loss, len(labels), {"scores": scores}


def micro_batches(seed=0):
    """Return micro-batches of 1 to 3 sequences each; no two have the same shapes."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number, length in enumerate(LENGTHS):
        ends = torch.tensor([length, 2 * length, 2 * length + 1][: 1 + number % 3])
        tokens = torch.randn(int(ends[-1]), 4, generator=generator)
        made.append((tokens, ends, torch.arange(len(ends)) % 3))
    return made


EXAMPLES = [1, 2, 3, 1, 2]


def trained(**options):
    torch.manual_seed(0)
    with open_trainer(Packed(), objective=objective, **options) as trainer:
        losses = []
        for seed in range(4):
            loss = trainer.step(Shards(micro_batches(seed), EXAMPLES))
            losses.append((float(loss), loss.outputs["scores"].tolist()))
    return whole_state(trainer.model, trainer.optimizer), losses


@pytest.mark.parametrize(("devices", "in_flight"), [(3, 1), (own(3), 1), (2, 2), (own(2), 2)])
def test_on_every_layout(devices, in_flight):
    expected, losses = trained(devices=1)
    state, got = trained(devices=devices, max_in_flight=in_flight)
    assert_same_bits(state, expected)
    assert got == losses
    assert losses[0] != losses[1]


def test_a_compiled_training_computes_them_eagerly():
    assert_same_bits(trained(compile=True)[0], trained(devices=1)[0])


def linear(model, X, y):
    return F.cross_entropy(model(X), y, reduction="sum"), len(y)


def test_the_same_cut_is_the_same_step():
    """Cut by hand as evenstep cuts, micro-batches give the bits of the whole batch."""
    X, y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3
    states = []
    for batch in ((X, y), (Shards([*zip(X.split(3), y.split(3), strict=True)]),)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        with open_trainer(model, objective=linear) as trainer:
            for _ in range(3):
                trainer.step(*batch)
        states.append(whole_state(model, trainer.optimizer))
    assert_same_bits(*states)


def test_a_single_micro_batch_is_the_plain_step():
    X, y = torch.randn(5, 4), torch.arange(5) % 3
    plain, model = nn.Linear(4, 3), nn.Linear(4, 3)
    model.load_state_dict(plain.state_dict())
    F.cross_entropy(plain(X), y).backward()
    with open_trainer(model) as trainer:
        trainer.backward(Shards([(X, y)]))
    assert torch.equal(model.weight.grad, plain.weight.grad)


def test_constants_differ_from_one_to_the_next():
    def scaled(model, X, y, scale):
        return scale * F.cross_entropy(model(X), y, reduction="sum"), scale * len(y)

    model = nn.Linear(4, 3)
    X, y = torch.randn(6, 4), torch.arange(6) % 3
    batch = Shards([(X[:2], y[:2], 1.0), (X[2:], y[2:], 3.0)])
    expected = scaled(model, X[:2], y[:2], 1.0)[0] + scaled(model, X[2:], y[2:], 3.0)[0]
    with open_trainer(model, objective=scaled) as trainer:
        assert float(trainer.step(batch)) == pytest.approx(expected.item() / 14)


def test_the_contract_is_checked_on_them():
    seen = []

    def remembers(model, X, y):
        seen.append(len(seen))
        loss, count = linear(model, X, y)
        return loss * len(seen), count

    batch = Shards([(torch.randn(2, 4), torch.zeros(2).long()) for _ in range(3)])
    with (
        open_trainer(nn.Linear(4, 3), objective=remembers, devices=1) as trainer,
        pytest.raises(ContractError),
    ):
        trainer.step(batch)


def test_a_batch_in_flight_must_not_be_written_to():
    arrays = [np.ones((2, 4), dtype=np.float32) for _ in range(3)]
    batch = [(torch.from_numpy(array), torch.zeros(2).long()) for array in arrays]
    results = []
    for in_flight in (1, 2):
        torch.manual_seed(0)
        options = {"objective": linear, "devices": own(2), "max_in_flight": in_flight}
        with open_trainer(nn.Linear(4, 3), **options) as trainer:
            for step in range(4):
                for array in arrays:
                    array[:] = step
                trainer.step(Shards(batch))
            results.append(trainer.fingerprint())
    assert results[0] == results[1]


ROW = (torch.zeros(2, 4), torch.zeros(2).long())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Shards([]), "needs a list of micro-batches, with at least one"),
        (lambda: Shards(torch.zeros(3)), "needs a list of micro-batches, with at least one"),
        (lambda: Shards([ROW, ()]), "micro-batch 1 of evenstep.Shards has no tensor"),
        (lambda: Shards([ROW, object()]), "micro-batch 1 .* of type object"),
        (lambda: Shards([ROW], [1, 2]), r"examples=\[1, 2\] for 1 micro-batches"),
        (lambda: Shards([ROW], [0]), "give one number for each micro-batch, at least 1"),
    ],
    ids=["empty", "tensor", "no tensor", "object", "too many numbers", "zero"],
)
def test_wrong_micro_batches_are_named(make, said):
    with pytest.raises(BatchError, match=said):
        make()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((Shards([ROW] * 9),), r"9 micro-batches, .* at most 8 shards: use Trainer\(shards=9\)"),
        ((Shards([ROW]), ROW[1]), "Shards and other arguments"),
    ],
    ids=["more than V", "beside others"],
)
def test_a_step_takes_as_many_as_it_has_shards(arguments, said):
    with (
        open_trainer(nn.Linear(4, 3), objective=linear) as trainer,
        pytest.raises(BatchError, match=said),
    ):
        trainer.step(*arguments)
