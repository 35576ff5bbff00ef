"""Losses of the user's own making, and changed ones, have the mean that plain torch gives."""

import functools

import pytest
import torch
from torch import nn

from evenstep.devices import accelerator
from evenstep.errors import ContractError, ModelError
from evenstep.shard.loss import _PlacedLoss
from layouts import own
from trainers import open_trainer

CLASSES = 4
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(16, 6, dtype=torch.float64, generator=GENERATOR)
Y = torch.randint(0, CLASSES, (16,), generator=GENERATOR)
TOKENS = torch.randint(0, CLASSES, (16, 5), generator=GENERATOR)


def net():
    torch.manual_seed(0)
    return nn.Linear(6, CLASSES).double()


def language_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5 * CLASSES), nn.Unflatten(1, (5, CLASSES))).double()


LAYOUTS = [
    {"shards": 1, "devices": 1},
    {"shards": 4, "devices": own(2)},
    {"shards": 3, "devices": 2},
]


def opened(model, loss, **options):
    return open_trainer(
        model, loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), **options
    )


def assert_trains_as_plainly(
    make_model, make_loss, batches, change=lambda loss, step: None, layouts=LAYOUTS
):
    """Compare the weights after steps on whole batches with those of the plain loop in float64."""
    plain, loss = make_model(), make_loss()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    expected = []
    for step, (inputs, target) in enumerate(batches):
        change(loss, step)
        optimizer.zero_grad()
        value = loss(plain(inputs), target)
        value.backward()
        optimizer.step()
        expected.append(value.item())
    for options in layouts:
        model, loss, losses = make_model(), make_loss(), []
        with opened(model, loss, **options) as trainer:
            for step, batch in enumerate(batches):
                change(loss, step)
                losses.append(float(trainer.step(*batch)))
        assert losses == pytest.approx(expected, rel=1e-12)
        for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-11, atol=1e-13)


class Shifted(nn.CrossEntropyLoss):
    """A language model's loss: each position predicts the next token."""

    def forward(self, logits, tokens):
        shifted = logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        return super().forward(*shifted)


class ShiftedNLL(nn.NLLLoss):
    def forward(self, logits, tokens):
        logs = logits.log_softmax(-1)[:, :-1].flatten(0, 1)
        return super().forward(logs, tokens[:, 1:].flatten())


@pytest.mark.parametrize("kind", [Shifted, ShiftedNLL])
def test_a_subclass_with_a_forward_of_its_own_is_a_mean_over_its_own_targets(kind):
    tokens = TOKENS.clone()
    tokens[::2, 0] = -100  # never a target, since the first one has none before it
    assert_trains_as_plainly(language_model, kind, [(X, tokens)] * 3)


@pytest.mark.parametrize("kind", [Shifted, ShiftedNLL])
@pytest.mark.parametrize("first", [0, 4, 5, 14])
def test_a_subclass_that_ignores_targets_unevenly_is_refused_with_what_to_write(kind, first):
    tokens = TOKENS.clone()
    tokens[first : first + 2, 2:] = -100  # two of sixteen examples, in one or two of eight shards
    with (
        opened(language_model(), kind(), shards=8) as trainer,
        pytest.raises(ContractError, match="does not add up.*ignored or padded tokens: return"),
    ):
        trainer.step(X, tokens)


def test_a_subclass_with_torchs_own_forward_keeps_its_count():
    class Named(nn.CrossEntropyLoss):
        pass

    labels = Y.clone()
    labels[:5] = -100
    make_loss = functools.partial(Named, weight=WEIGHT)
    assert_trains_as_plainly(net, make_loss, [(X, labels)] * 2)


def without_smoothing(loss, step):
    loss.label_smoothing = 0.3 if step == 0 else 0.0


def with_another_index(loss, step):
    loss.ignore_index = step


def with_another_weight(loss, step):
    loss.weight = WEIGHT.flip(0) if step else WEIGHT


def with_a_written_weight(loss, step):
    if step:
        loss.weight[0] += step


CHANGES = {
    "smoothing": (nn.CrossEntropyLoss, without_smoothing),
    "index": (nn.CrossEntropyLoss, with_another_index),
    "weight": (nn.CrossEntropyLoss, with_another_weight),
    "weight in place": (lambda: nn.CrossEntropyLoss(WEIGHT.clone()), with_a_written_weight),
}


@pytest.mark.parametrize("name", CHANGES)
def test_settings_changed_between_steps_count_from_the_next_step_on(name):
    assert_trains_as_plainly(net, CHANGES[name][0], [(X, Y)] * 3, CHANGES[name][1])


@pytest.mark.parametrize("name", ["smoothing", "index"])
@pytest.mark.slow
def test_settings_changed_between_compiled_steps_count(name):
    make_loss, change = CHANGES[name]
    layouts = [{"shards": 4, "devices": 1, "compile": True}]
    assert_trains_as_plainly(net, make_loss, [(X, Y)] * 3, change, layouts)


@pytest.mark.parametrize("make", [nn.CrossEntropyLoss, nn.MSELoss])
def test_a_loss_that_becomes_a_sum_is_refused(make):
    loss, target = make(), Y if make is nn.CrossEntropyLoss else X[:, :CLASSES]
    with opened(net(), loss) as trainer:
        trainer.step(X, target)
        loss.reduction = "sum"
        with pytest.raises(ModelError, match="needs a mean"):
            trainer.step(X, target)


def test_a_hook_of_a_loss_sees_the_mean_of_each_shard():
    seen, loss = [], nn.CrossEntropyLoss()
    loss.register_forward_hook(lambda module, args, total: seen.append(total.item()))
    with opened(net(), loss, shards=4, check="off") as trainer:
        value = float(trainer.step(X, Y))
    assert len(seen) == 4
    assert sum(seen) / 4 == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("ignored", [0, 3, 4])
def test_a_hook_that_changes_the_loss_changes_the_mean(ignored):
    """Such as "flooding", which keeps a training loss above a level.

    Source: Ishida et al., Do we need zero training loss after achieving zero training error?
    """

    def flooded():
        loss = nn.CrossEntropyLoss(ignore_index=-1)
        loss.register_forward_hook(lambda module, args, mean: (mean - 99).abs() + 99)  # uphill
        return loss

    labels = Y.clone()
    labels[:ignored] = -1
    assert_trains_as_plainly(net, flooded, [(X, labels)] * 3)


def test_a_hook_that_bends_the_loss_where_shards_lie_is_refused():
    loss = nn.CrossEntropyLoss()
    loss.register_forward_hook(lambda module, args, mean: mean.square())
    with (
        opened(net(), loss, shards=4) as trainer,
        pytest.raises(ContractError, match="does not add up"),
    ):
        trainer.step(X, Y)


@pytest.mark.parametrize("name", CHANGES)
def test_a_copy_of_a_loss_on_another_device_follows_its_settings(name, monkeypatch):
    monkeypatch.setattr(accelerator, "fence_here", lambda device: None)  # "meta" has no kernels
    monkeypatch.setattr(accelerator, "wait_here", lambda fence, device: None)
    make_loss, change = CHANGES[name]
    loss = make_loss()
    placed = _PlacedLoss(loss)
    found = []
    for step in range(2):
        change(loss, step)
        found.append(placed.on(torch.device("meta")))
        assert placed.on(torch.device("meta")) is found[-1]
        assert found[-1].label_smoothing == loss.label_smoothing
        assert found[-1].ignore_index == loss.ignore_index
        assert (found[-1].weight is None) == (loss.weight is None)
    assert found[0] is not found[1]
