"""What an experiment consists of: parts to measure, and a table of their figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch.utils.data import TensorDataset

from evenstep.bench.tables import NOTHING

Data: TypeAlias = "tuple[TensorDataset, TensorDataset]"
"""Examples to train on, and examples to test with."""

Figures: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The measured figures by key of their part; parts that are not measured yet are missing."""

Size: TypeAlias = Literal["quick", "full"]
"""Whether the experiments are shortened, or as the book has them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workplace:
    """What parts need in order to be measured."""

    data: Callable[[], Data]  # returns the data set Fashion-MNIST
    folder: Path  # holds the checkpoints of unfinished parts
    say: Callable[[str], object]  # called with lines of progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A part of an experiment, measured at once and recorded."""

    key: str  # key of its figures
    label: str  # description for progress lines
    measure: Callable[[Workplace], Mapping[str, Any]]  # returns the figures


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row of an experiment's table."""

    text: str  # what the figure is
    book: str = NOTHING  # the book's figure
    here: str  # this machine's figure
    why: str = ""  # what differs, and why


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """An experiment of the book."""

    name: str  # name for `--only`
    title: str  # heading in the report
    section: str  # section of the book
    question: str  # what the experiment asks
    lesson: str  # what a reader learns, in one sentence
    parts: Sequence[Part]  # the parts, in the order in which they are measured
    rows: Callable[[Figures], list[Row]]  # returns the table
    pictures: Sequence[str] = ()  # names of its pictures in `pictures.py`
    needs_data: bool = False  # whether a part needs the data set
    optional: Sequence[str] = ()  # keys of long parts that the table can do without

    def can_be_shown(self, figures: Figures) -> bool:
        """Return whether all parts that the table needs have been measured."""
        return all(part.key in figures for part in self.parts if part.key not in self.optional)

    def missing(self, figures: Figures) -> list[Part]:
        """Return the parts that have not been measured yet."""
        return [part for part in self.parts if part.key not in figures]
