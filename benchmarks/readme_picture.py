"""Draws the README's picture: LeNet's accuracy on one device and on two, in the book and here.

Both trainings have a batch of 256 and a learning rate of 0.2. `write_docs.py` calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evenstep.bench.pictures import BLUE, RED, canvas, to_svg
from evenstep.reproduce.experiments import descriptions
from evenstep.reproduce.plan import Figures

_LOOKS: Sequence[dict[str, Any]] = (
    {"label": "one device", "color": BLUE, "linewidth": 6, "alpha": 0.4},
    {"label": "two devices", "color": RED, "linestyle": "--", "marker": "o"},
)
"""Of one device and of two: both can be seen where they have the same points."""


def draw(figures: Figures) -> str | None:
    """Return the picture as SVG; None if one of the trainings has not been measured."""
    keys = ("lenet.book.1", "lenet.book.2")
    if not all(key in figures for key in keys):
        return None
    book = [*descriptions()["lenet"]["book_accuracies"].values()]
    here = [figures[key]["accuracies"][: len(book[0])] for key in keys]  # as many epochs
    with canvas(2, size=(4.4, 2.7)) as (figure, panels):  # readable when it is 360 pixels wide
        titles = ("as the book does it", "evenstep")
        for axes, title, curves in zip(panels, titles, (book, here), strict=True):
            for values, look in zip(curves, _LOOKS, strict=True):
                axes.plot(range(1, len(values) + 1), values, **look)
            axes.set(title=title, xlabel="epoch", ylim=(0, 1))
            axes.set_xticks(range(1, len(book[0]) + 1))
            axes.label_outer()
        panels[0].set_ylabel("test accuracy")
        lines = panels[0].get_legend_handles_labels()
        figure.legend(*lines, loc="outside lower center", ncols=2)
        return to_svg(figure)
