"""What opening a trainer and the check of its first step do: counted, not timed."""

import gc

import pytest
import torch.nn.functional as F
from torch import nn

import evenstep
from checked import CLASSES, X, Y, train
from evenstep.errors import ContractError
from evenstep.private_torch.dispatch import dispatch_modes
from trainers import sgd


class Watched(nn.Module):
    """Notes in each call the modes that look at every op, and how often its parts are listed."""

    def __init__(self, probability=0.0):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(X.shape[1], 8), nn.ReLU(), nn.Linear(8, CLASSES))
        self.probability = probability
        self.__dict__["seen"] = SEEN
        SEEN.clear()
        WALKS.clear()

    def forward(self, x):
        SEEN.append(len(dispatch_modes()))
        return self.layers(F.dropout(x, self.probability) if self.probability else x)

    def named_parameters(self, *args, **options):
        WALKS.append("parameters")
        return super().named_parameters(*args, **options)

    def named_modules(self, *args, **options):
        WALKS.append("modules")
        return super().named_modules(*args, **options)


SEEN, WALKS = [], []


def test_a_check_looks_at_each_op_of_one_forward_pass():
    train(Watched(), batches=[(X, Y)])
    assert len(SEEN) == 31
    assert [count for count in SEEN if count] == [1]


def test_only_of_a_model_that_draws_in_evaluation_other_passes_are_looked_at():
    train(Watched(0.5), batches=[(X, Y)])
    assert sum(map(bool, SEEN)) == 1 + 15  # 7 pairs of shards together, and 8 shards apart
    assert len(SEEN) == 31 + 1


def test_the_collector_rests_during_a_check_and_works_again():
    generations = []

    def note(phase, about):
        generations.append(about["generation"])

    class Littering(Watched):
        def forward(self, x):
            [[number] for number in range(2000)]
            if len(SEEN) == 3:
                gc.callbacks.append(note)
            if len(SEEN) == 15:
                gc.callbacks.remove(note)
            return super().forward(x)

    train(Littering(), batches=[(X, Y)])
    assert len(SEEN) >= 31
    assert generations == []
    assert gc.isenabled()


def test_the_collector_works_again_after_a_refusal():
    def objective(model, x, y):
        total = F.cross_entropy(model(x), y, reduction="sum")
        return total * len(SEEN), len(y)

    with pytest.raises(ContractError):
        train(Watched(), objective, batches=[(X, Y)])
    assert gc.isenabled()


def test_opening_walks_through_the_model_a_few_times():
    model = Watched()
    optimizer = sgd(model)
    WALKS.clear()
    with evenstep.Trainer(model, optimizer, nn.CrossEntropyLoss(), devices=1):
        walks = {kind: WALKS.count(kind) for kind in WALKS}
    assert walks["parameters"] <= 3
    assert walks["modules"] <= 8
