"""A curve as lines of text, drawn with the dots of Braille characters."""

from __future__ import annotations

import codecs
import itertools
import math
from collections.abc import Iterator, Sequence

_WIDTH, _HEIGHT = 60, 8  # characters
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # of a character: rows, columns
_BRAILLE = 0x2800
_LABEL = 10


def curve_lines(
    name: str, steps: Sequence[int], values: Sequence[float], encoding: str = "utf-8"
) -> list[str]:
    """Return a curve as lines with its name, its largest and smallest value, and its steps.

    Args:
        name: what is drawn.
        steps: the step of each value, in ascending order.
        values: the values; what is not finite is left out.
        encoding: that of the stream. If it is not UTF-8, stars stand for dots.

    Returns:
        The lines; none without a finite value.
    """
    points = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
    if not points:
        return []
    is_utf8 = codecs.lookup(encoding).name == "utf-8"
    cells = [[0] * _WIDTH for _ in range(_HEIGHT)]
    for column, row in _dots(_columns(points)):
        cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
    low, high = min(v for _, v in points), max(v for _, v in points)
    labels = {0: f"{high:.4g}", _HEIGHT - 1: f"{low:.4g}"}
    bar = "│" if is_utf8 else "|"
    lines = [f"{'':{_LABEL}} {name}"]
    for number, row_of_cells in enumerate(cells):
        drawn = "".join(
            chr(_BRAILLE + cell) if is_utf8 else " *"[cell > 0] for cell in row_of_cells
        )
        lines.append(f"{labels.get(number, ''):>{_LABEL}} {bar}{drawn}".rstrip("\u2800 "))
    first, last = f"step {points[0][0]}", f"{points[-1][0]}"
    return [*lines, f"{'':{_LABEL}}  {first}{last:>{_WIDTH - len(first)}}"]


def _columns(points: Sequence[tuple[int, float]]) -> dict[int, int]:
    """Return the row of dots of each column that has points: that of their mean."""
    columns, rows = 2 * _WIDTH - 1, 4 * _HEIGHT - 1
    (first, _), (last, _) = points[0], points[-1]
    low, high = min(v for _, v in points), max(v for _, v in points)
    found: dict[int, list[float]] = {}
    for step, value in points:
        found.setdefault(round(columns * (step - first) / max(1, last - first)), []).append(value)
    return {
        column: round(rows * (high - sum(v / len(some) for v in some)) / ((high - low) or 1))
        for column, some in found.items()
    }


def _dots(rows: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Yield (column, row) of the dots of lines that connect `rows`."""
    places = sorted(rows.items())
    yield places[0]
    for (column, row), (next_column, next_row) in itertools.pairwise(places):
        count = max(next_column - column, abs(next_row - row))
        for n in range(1, count + 1):
            yield (
                column + round(n * (next_column - column) / count),
                row + round(n * (next_row - row) / count),
            )
