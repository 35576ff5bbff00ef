"""Losses that do not add up over shards are refused, and no others."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from checked import (
    CLASSES,
    X,
    Y,
    contrast,
    net,
    summed,
    train,
)
from evenstep.errors import ContractError


def of_tokens(model, X, y):
    """Weighs every example like the others, though some have fewer tokens."""
    tokens = y[:, None].expand(-1, 3).clone()
    tokens[::3, 1:] = -100
    logits = model(X)[:, :, None].expand(-1, -1, 3)
    return F.cross_entropy(logits, tokens) * len(y), len(y)


NOT_SEPARABLE = {
    "contrastive": contrast,
    "mean and one": lambda m, X, y: (F.cross_entropy(m(X), y), 1),
    "token weights lost": of_tokens,
    "statistics of the batch": lambda m, X, y: ((m(X) - m(X).mean(0)).square().sum(), len(y)),
    "class weights forgotten": lambda m, X, y: (
        F.cross_entropy(m(X), y, weight=torch.tensor([1.0, 2.0, 3.0, 9.0])) * len(y),
        len(y),
    ),
}


def test_a_mean_of_nothing_in_one_shard_is_a_loss_that_does_not_add_up():
    """Not a loss that adds up, with gradients that don't: its gradients are finite."""
    labels = torch.arange(32) % 3
    labels[4:8] = -100  # all that the second of eight shards has
    with pytest.raises(ContractError, match=r"does not add up .* \+ nan"):
        train(nn.Linear(6, CLASSES), lambda m, X, y: F.cross_entropy(m(X), y), [(X, labels)])


@pytest.mark.parametrize("objective", NOT_SEPARABLE.values(), ids=NOT_SEPARABLE)
def test_an_objective_that_does_not_add_up_is_refused(objective):
    labels = torch.arange(32) % 3  # other class weights in every shard
    with pytest.raises(ContractError, match="does not add up over the shards: 8 examples"):
        train(nn.Linear(6, CLASSES), objective, [(X, labels)])


def test_a_mean_with_class_weights_in_a_lambda_is_refused():
    loss = functools.partial(F.cross_entropy, weight=torch.tensor([1.0, 2.0, 3.0, 9.0]))
    train(nn.Linear(6, CLASSES), loss=loss)  # evenstep knows what this divides by
    with pytest.raises(ContractError, match="class weights"):
        train(
            nn.Linear(6, CLASSES), loss=lambda o, y: loss(o, y), batches=[(X, torch.arange(32) % 3)]
        )


@pytest.mark.parametrize("shards", [8, 16])
def test_class_weights_are_found_where_the_first_shards_have_equal_labels(shards):
    labels = torch.tensor([0] * 8 + [1] * 4 + [0, 1] * 10)
    loss = functools.partial(F.cross_entropy, weight=torch.tensor([1.0, 9.0, 1.0, 1.0]))
    with pytest.raises(ContractError, match="class weights"):
        train(net(), loss=lambda o, y: loss(o, y), batches=[(X, labels)], shards=shards)


def test_later_checks_compare_other_shards():
    """Of eight shards, the seventh alone has padding, from the second step on."""
    padded = Y.clone()
    padded[24:26] = -100
    batches = [(X, Y)] + [(X, padded)] * 140
    objective = lambda m, X, y: F.cross_entropy(m(X), y)  # noqa: E731
    with pytest.raises(ContractError, match="padded tokens"):
        train(net(), objective, batches, shards=8)


def test_data_along_another_dimension_are_refused():
    rnn = nn.LSTM(6, CLASSES)  # (time, batch, features)
    batch = (torch.randn(16, 16, 6), torch.zeros(16))
    with pytest.raises(ContractError, match="batch_dim"):
        train(rnn, lambda m, X, y: (m(X)[0].square().sum(), X.shape[0]), [batch])


def test_one_and_the_same_count_is_explained():
    with pytest.raises(ContractError, match=r"return the sum over the examples and their number"):
        train(net(), NOT_SEPARABLE["mean and one"])


@pytest.mark.parametrize("options", [{"separable": False}, {"shards": 1}], ids=str)
def test_who_means_it_may_train_on_what_does_not_add_up(options):
    state, _ = train(nn.Linear(6, CLASSES), contrast, **options)
    assert all(torch.isfinite(value).all() for value in state.values())


def policy_gradient(model, X, y, advantage):
    chosen = model(X).log_softmax(1).gather(1, y[:, None])[:, 0]
    return -(chosen * advantage).sum(), len(y)


def drawn_into_a_tensor(model, X, y):
    order = torch.empty(len(X), 6, dtype=torch.int64)
    torch.multinomial(F.softmax(X, 1), 6, out=order)
    return summed(model, X.gather(1, order), y)


class Narrow(nn.Module):
    """May round its numbers more than others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, CLASSES)).bfloat16()

    def forward(self, x):
        return self.layers(x.bfloat16().reshape(1, -1, 6)).float()[0]


def normalised():
    """Batch normalisation by the statistics of the shard, in evaluation mode too."""
    return nn.Sequential(nn.BatchNorm1d(6, track_running_stats=False), net())


def attention():
    layer = nn.TransformerEncoderLayer(2, 1, 4, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (3, 2)), layer, nn.Flatten(), net())


DRAWING = {
    "noise": lambda X: X + torch.randn_like(X) * torch.rand(len(X), 1),
    "dropout": lambda X: F.dropout(X, 0.3),
    "mask": lambda X: X * (torch.rand(len(X), 1) < 0.7) * torch.bernoulli(torch.full((6,), 0.5)),
    "time": lambda X: X * torch.randint(1, 9, (len(X), 1)) + torch.empty(len(X), 1).uniform_(2, 3),
    "choice": lambda X: X[:, torch.multinomial(torch.ones(6), 3)].repeat(1, 2),
    "columns": lambda X: X[:, torch.randperm(6)],
    "share": lambda X: X * torch.distributions.Beta(0.4, 0.4).sample((len(X), 1)),
    "scale": lambda X: X * torch.distributions.Gamma(2.0, 1.0).sample((len(X), 1)),
}


def drawing(draw):
    return lambda model, X, y: summed(model, draw(X), y)


JUDGED = {
    **{name: (net, drawing(draw)) for name, draw in DRAWING.items()},
    "a tensor for the draws": (net, drawn_into_a_tensor),
    "attention, with dropout": (attention, summed),
    "rrelu": (lambda: nn.Sequential(nn.RReLU(), net()), summed),
    "batch norm without statistics": (normalised, summed),
    "narrow": (Narrow, lambda m, X, y: (m(X).square().sum(), len(y))),
}


@pytest.mark.parametrize("name", JUDGED)
def test_what_adds_up_is_judged_and_taken(name):
    make_model, objective = JUDGED[name]
    _, report = train(make_model(), objective)
    assert report.unjudged == ""


def test_totals_that_cancel_are_judged_and_taken():
    advantage = torch.randn(32)
    _, report = train(net(), policy_gradient, [(X, Y, advantage - advantage.mean())])
    assert report.unjudged == ""


def test_beside_batch_norm_without_running_statistics_the_rest_must_add_up():
    with pytest.raises(ContractError, match="does not add up"):
        train(normalised(), lambda model, X, y: (F.cross_entropy(model(X), y), len(y)))


def test_examples_mixed_at_random_are_refused():
    def mixed(model, X, y):
        return summed(model, X + X[torch.randperm(len(X))], y)

    with pytest.raises(ContractError, match="does not add up"):
        train(net(), mixed)


def test_what_cannot_be_judged_is_said():
    def only_in_training(model, X, y):
        assert model.training, "no loss in evaluation mode"
        return summed(model, X, y)

    assert "no loss in evaluation mode" in train(net(), only_in_training)[1].unjudged

    def counting(model, X, y):
        return summed(model, X * torch.poisson(torch.ones(len(X), 1)), y)

    assert "random numbers by poisson" in train(net(), counting)[1].unjudged


def test_gradients_that_are_divided_by_frequencies_are_refused():
    model = nn.Sequential(
        nn.Embedding(9, 4, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(24, 4)
    )
    indices = X.abs().long()
    with pytest.raises(ContractError, match="gradients of 0 don't add up"):
        train(model, batches=[(indices, Y)])
    train(model, batches=[(indices, Y)], shards=1)
    train(model, batches=[(indices, Y)], separable=False)
