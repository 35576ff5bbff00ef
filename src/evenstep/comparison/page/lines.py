"""Series of numbers as lines of an SVG picture."""

from __future__ import annotations

import math
from collections.abc import Sequence

WIDTH, HEIGHT = 560, 160

_LEAST = 1e-9
"""What is drawn at the lower edge of a picture of distances."""


def lines(
    series: Sequence[Sequence[float | None]],
    lowest: float | None = None,
    highest: float | None = None,
) -> list[str]:
    """Return each series as points of a polyline; values that are none or infinite are left out.

    The lower and the upper edge are the smallest and the largest value unless they are given.
    """
    known = [one for part in series for one in part if one is not None and math.isfinite(one)]
    bottom = min(known, default=0.0) if lowest is None else lowest
    top = max(known, default=1.0) if highest is None else highest
    found = []
    for part in series:
        points = []
        for place, value in enumerate(part):
            if value is None or not math.isfinite(value):
                continue
            x = WIDTH * place / max(len(part) - 1, 1)
            y = HEIGHT * (1 - (value - bottom) / ((top - bottom) or 1.0))
            points.append(f"{x:.1f},{y:.1f}")
        found.append(" ".join(points))
    return found


def lines_of_distances(series: Sequence[Sequence[float]]) -> list[str]:
    """Return distances from 0 to 1 as points of polylines, on a scale of powers of ten."""
    return lines([[_log(one) for one in part] for part in series], math.log10(_LEAST), 0.0)


def _log(value: float) -> float | None:
    return None if value == 0 else math.log10(min(max(value, _LEAST), 1.0))
