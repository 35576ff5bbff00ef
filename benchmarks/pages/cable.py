"""The section on two machines with a cable between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenstep.bench.rounds import paired_ratios, summarise
from pages.common import joined, note, origin
from text import NOTHING, number, spread, table


def section(document: dict[str, Any], notes: Mapping[str, str]) -> str:
    """Return the section."""
    settings = document["settings"]
    rate = settings["rate"].replace("gbit", " Gbit")
    text = (
        f"ResNet-18 over two machines of one core each, with {rate} a second between "
        f"them: network namespaces of one machine, and a token bucket at each end of their cable. "
        f"The same global batch of {settings['examples']} for all. Ratios are taken within a round."
    )
    head = ("training", "examples/s", "spread", "over DDP", "spread of it")
    speeds = {
        variant: {
            run["round"]: run["examples_per_s"]
            for run in document["runs"]
            if run["variant"] == variant
        }
        for variant in document["variants"]
    }
    rows = [
        _row(label, speeds[variant], speeds["ddp"])
        for variant, label in document["variants"].items()
    ]
    return joined(
        "## Two machines", origin(document), text, table(head, rows), note(notes, "cable")
    )


def _row(label: str, own: dict[int, float], rival: dict[int, float]) -> list[str]:
    if not own:
        return [label, *[NOTHING] * 4]
    speed, ratios = summarise([*own.values()]), paired_ratios(own, rival)
    row = [label, number(speed.median), spread(speed)]
    if own is rival or not ratios:
        return [*row, NOTHING, NOTHING]
    return [*row, f"{number(summarise(ratios).median)}×", spread(summarise(ratios))]
