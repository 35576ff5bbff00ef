"""Metrics of torchmetrics for classification and regression: what their own update gives, by bits.

Some rows lie in [0, 1] and others don't: torchmetrics takes the numbers of an update for logits if
any of them lies outside.
"""

import warnings

import optree
import pytest
import torch
from torch import nn

from trainers import open_trainer

classification = pytest.importorskip("torchmetrics.classification")
regression = pytest.importorskip("torchmetrics.regression")

CLASSES = 4
SIZES = (16, 17, 5)
OPTIONS = {
    "FixedRecall": {"min_recall": 0.5},
    "FixedPrecision": {"min_precision": 0.5},
    "AtSpecificity": {"min_specificity": 0.5},
    "AtSensitivity": {"min_sensitivity": 0.5},
    "FBetaScore": {"beta": 0.5},
    "Fairness": {"num_groups": 2},
    "GroupStatRates": {"num_groups": 2},
    "CriticalSuccessIndex": {"threshold": 0.5},
    "MinkowskiDistance": {"p": 3},
}


class Given(nn.Module):
    """Returns its input: an output that is the same in every shard."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x


def draw(make):
    """Return a batch of each size."""
    generator = torch.Generator().manual_seed(0)
    return [make(size, generator) for size in SIZES]


def scores(*shape, generator):
    """Return numbers of which a batch's first two rows lie in [0, 1]."""
    drawn = torch.randn(*shape, generator=generator) * 3
    drawn[:2] = torch.rand(2, *shape[1:], generator=generator)
    return drawn


def binary(size, generator):
    return scores(size, generator=generator), torch.randint(2, (size,), generator=generator)


def grouped(size, generator):
    groups = torch.randint(2, (size,), generator=generator)
    return *binary(size, generator), groups


def multiclass(size, generator):
    labels = torch.randint(CLASSES, (size,), generator=generator)
    return scores(size, CLASSES, generator=generator), labels


def exact_match(size, generator):
    labels = torch.randint(CLASSES, (size, 3), generator=generator)
    return scores(size, CLASSES, 3, generator=generator), labels


def multilabel(size, generator):
    labels = torch.randint(2, (size, CLASSES), generator=generator)
    return scores(size, CLASSES, generator=generator), labels


def numbers(size, generator):
    return scores(size, generator=generator), scores(size, generator=generator)


def positive(size, generator):
    return tuple(one.abs() for one in numbers(size, generator))


def rows(size, generator):
    return scores(size, 3, generator=generator), scores(size, generator=generator)


def distributions(size, generator):
    return tuple(torch.rand(size, 3, generator=generator) + 0.1 for _ in range(2))


KINDS = {"Binary": binary, "Multiclass": multiclass, "Multilabel": multilabel}
OTHERS = {
    **dict.fromkeys(("BinaryFairness", "BinaryGroupStatRates"), grouped),
    **dict.fromkeys(("KLDivergence", "JensenShannonDivergence", "CosineSimilarity"), distributions),
    "MulticlassExactMatch": exact_match,
    "ContinuousRankedProbabilityScore": rows,
    "MeanSquaredLogError": positive,
}


def batches_of(name):
    kinds = [batches for kind, batches in KINDS.items() if name.startswith(kind)]
    return OTHERS.get(name, [*kinds, numbers][0])


def options_of(name):
    options = {"num_classes": CLASSES} if name.startswith("Multiclass") else {}
    options |= {"num_labels": CLASSES} if name.startswith("Multilabel") else {}
    for part, more in OPTIONS.items():
        options |= more if part in name else {}
    return options


def made():
    """Return all metrics, by what their batches are made of."""
    names = [name for name in classification.__all__ if name.startswith((*KINDS,))]
    by_batches = {}
    for name in [*names, *regression.__all__]:
        room = regression if name in regression.__all__ else classification
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of much memory
            metric = getattr(room, name)(**options_of(name))
        by_batches.setdefault(batches_of(name), {})[name] = metric
    return by_batches


def plain(metric, batches):
    """Return what a metric gives that is updated with every batch."""
    metric = metric.clone()
    for batch in batches:
        metric.update(*batch)
    return metric.compute()


def are_equal(one, other):
    ours, theirs = optree.tree_leaves(one), optree.tree_leaves(other)
    if len(ours) != len(theirs):
        return False
    pairs = [
        [torch.as_tensor(leaf).double() for leaf in pair] for pair in zip(ours, theirs, strict=True)
    ]
    return all(
        left.shape == right.shape and torch.equal(left.nan_to_num(7e7), right.nan_to_num(7e7))
        for left, right in pairs
    )


@pytest.mark.filterwarnings("ignore")  # torchmetrics' own, of classes without examples
@pytest.mark.parametrize("shards", [1, 3, 8])
def test_every_metric_is_that_of_its_own_update(shards):
    compared, different = 0, []
    with open_trainer(Given(), loss=nn.MSELoss(), shards=shards) as trainer:
        for make, metrics in made().items():
            batches = draw(make)
            found = trainer.evaluate(batches, metrics)
            expected = {name: plain(one, batches) for name, one in metrics.items()}
            compared += len(expected)
            different += [name for name in expected if not are_equal(found[name], expected[name])]
    assert different == []
    assert compared > 85
