"""All experiments, in the order of the book."""

from __future__ import annotations

from evenstep.book.reproduce.lineup import BOOK, QUICK
from evenstep.book.reproduce.plan import Experiment, Size
from evenstep.book.reproduce.small_experiments import engine_experiments, hybridize
from evenstep.book.reproduce.training_experiments import QUICK as SHORTENED
from evenstep.book.reproduce.training_experiments import lenet, resnet18, sixteen

EXPERIMENTS = (
    *("hybridize", "queued", "waiting", "memory", "together", "copies"),
    *("lenet", "resnet18", "sixteen"),
)
"""Their names."""


def experiments(size: Size) -> list[Experiment]:
    """Return the experiments as the book has them, or shortened to a few minutes in all."""
    if size == "quick":
        small = engine_experiments(QUICK, rounds=1, contenders=("engine",))
        return [hybridize(3), *small, *(make(SHORTENED) for make in (lenet, resnet18, sixteen))]
    small = engine_experiments(BOOK, rounds=3, contenders=("engine", "bare"))
    return [hybridize(15), *small, *(make(None) for make in (lenet, resnet18, sixteen))]
