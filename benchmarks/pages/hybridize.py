"""The section on a model that is called again and again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenstep.bench.rounds import summarise
from pages.common import joined, note, origin
from targets import HYBRIDIZED_GAIN
from text import NOTHING, number, spread, table, verdict


def section(document: dict[str, Any], notes: Mapping[str, str]) -> str:
    """Return the section."""
    runs, settings = document["runs"], document["settings"]
    text = (
        f"The network of the book's `hybridize` experiment (512, 256, 128, 2) on one example, one "
        f"thread: microseconds a call, of {settings['calls']:,} calls the best of "
        f"{settings['rounds']} turns, the median over the runs. The book's gain with MXNet was "
        f"2.4×. Finding the way took {number(summarise([run['found_s'] for run in runs]).median)} "
        f"s; taken was: {', '.join(sorted({run['way'] for run in runs}))}; its outputs differ by "
        f"at most {max(run['max_difference'] for run in runs):.0e}."
    )
    eager = summarise([run["eager_us"] for run in runs])
    fast = summarise([run["hybrid_us"] for run in runs])
    gain = summarise([run["eager_us"] / run["hybrid_us"] for run in runs])
    head = ("called", "µs a call", "spread", "gain", "spread of it", "target", "verdict")
    rows = [
        ["`net(x)`", number(eager.median), spread(eager), *[NOTHING] * 4],
        [
            "`evenstep.hybridize(net, x)(x)`",
            number(fast.median),
            spread(fast),
            f"{number(gain.median)}×",
            spread(gain),
            f"≥ {HYBRIDIZED_GAIN}×",
            verdict(gain.median >= HYBRIDIZED_GAIN),
        ],
    ]
    return joined(
        "## Hybridized inference", origin(document), text, table(head, rows), note(notes, "hybrid")
    )
