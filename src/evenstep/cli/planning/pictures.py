"""Pictures of a plan: a curve with its range, and bars of where the devices' time goes."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from evenstep.bench.pictures import BLUE, GREEN, GREY, RED, YELLOW, canvas, save, to_svg
from evenstep.planning import Plan

_SIZE = (11, 4.2)
_PARTS = {
    "compute": ("computing", BLUE),
    "wait": ("waiting for each other", YELLOW),
    "exchange": ("exchanging gradients", RED),
    "end": ("update, loading and the rest", GREEN),
}


def draw_plan(plan: Plan, file: Path) -> None:
    """Draw a plan into a file, in the format that its suffix names."""
    with canvas(2, size=_SIZE) as (figure, axes):
        _draw(plan, figure, axes)
        save(figure, file)


def page_of_plan(plan: Plan) -> str:
    """Return a page with the picture of a plan, and what it says."""
    with canvas(2, size=_SIZE) as (figure, axes):
        _draw(plan, figure, axes)
        picture = to_svg(figure).partition("<svg")[2]
    texts = [*plan.predictions[-1].reasons, *plan.advice, *(f"not seen: {x}" for x in plan.unseen)]
    lines = "\n".join(f"<li>{html.escape(text)}</li>" for text in texts)
    title = html.escape(_title(plan))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"</head><body>\n<h1>{title}</h1>\n<svg{picture}\n<ul>\n{lines}\n</ul>\n</body></html>\n"
    )


def _draw(plan: Plan, figure: Any, axes: Any) -> None:
    left, right = axes
    found = plan.predictions
    devices = [one.arrangement.devices for one in found]
    speeds = [one.examples_per_s for one in found]
    alone = found[0].examples_per_s / found[0].speed_up
    left.plot(devices, [alone * n for n in devices], ":", color=GREY, label="ideal")
    ranges = [one.least for one in found], [one.most for one in found]
    left.fill_between(devices, *ranges, color=BLUE, alpha=0.2, label="range")
    left.plot(devices, speeds, "o-", color=BLUE, label="predicted")
    if devices[-1] > 32:
        left.set_xscale("log", base=2)
        left.set_yscale("log")
    else:
        left.set_ylim(bottom=0)
    left.set(xlabel="devices", ylabel="examples/s", title=_title(plan))
    left.legend()
    bottoms, names = [0.0] * len(found), [*map(str, devices)]
    for part, (label, colour) in _PARTS.items():
        heights = [100 * one.shares[part] for one in found]
        right.bar(names, heights, bottom=bottoms, label=label, color=colour)
        bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
    right.set(xlabel="devices", ylabel="% of the devices' time", title="where the time goes")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4)


def _title(plan: Plan) -> str:
    work = plan.work
    return f"{work.name}, batch {work.examples:,}, V = {work.shards}"
