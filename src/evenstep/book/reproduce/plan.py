"""What an experiment is made of: parts to be measured, and what is shown of their figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch.utils.data import TensorDataset

Figures: TypeAlias = Mapping[str, Mapping[str, Any]]
"""What was measured, by the keys of the parts; those not measured yet are missing."""

Size: TypeAlias = Literal["quick", "full"]
"""All of the book's experiments, or a look at each of them."""

NOTHING = "–"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workplace:
    """Where parts are measured.

    Attributes:
        data: returns the examples of Fashion-MNIST to train on, and those to test with.
        folder: for what long parts keep while they run.
        tell: told lines of progress.
    """

    data: Callable[[], tuple[TensorDataset, TensorDataset]]
    folder: Path
    tell: Callable[[str], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Something that is measured in one go, and kept.

    Attributes:
        key: of its figures.
        label: what it is.
        measure: returns the figures.
    """

    key: str
    label: str
    measure: Callable[[Workplace], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A line of an experiment's table.

    Attributes:
        text: what it is about.
        book: the book's figure.
        here: this machine's.
        why: what differs, and why.
    """

    text: str
    book: str = NOTHING
    here: str
    why: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment of the book's.

    Attributes:
        name: as `--only` takes it.
        title: of its part of the report.
        section: of the book.
        question: what it asks, in a sentence or two.
        parts: to be measured, in this order.
        rows: the table.
        pictures: their names in `pictures.py`.
        needs_data: whether a part needs the examples.
        later: keys of parts that the table can do without, for they take long.
    """

    name: str
    title: str
    section: str
    question: str
    parts: Sequence[Part]
    rows: Callable[[Figures], list[Row]]
    pictures: Sequence[str] = ()
    needs_data: bool = False
    later: Sequence[str] = ()

    def can_be_shown(self, figures: Figures) -> bool:
        """Whether what the table needs was measured."""
        return all(part.key in figures for part in self.parts if part.key not in self.later)

    def missing(self, figures: Figures) -> list[Part]:
        """Return the parts that were not measured yet."""
        return [part for part in self.parts if part.key not in figures]
