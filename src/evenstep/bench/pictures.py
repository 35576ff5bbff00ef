"""Draws results with matplotlib, as PNG, SVG or any other format that matplotlib writes."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep.bench.rounds import Scaled, Summary, scaled, speeds, summarise
from evenstep.errors import InputError
from evenstep.files import write_file

BLUE, RED, GREEN, YELLOW, GREY = "#2a6f97", "#b56576", "#8ab17d", "#e9c46a", "#adb5bd"
COLOURS = {"blue": BLUE, "red": RED, "yellow": YELLOW, "grey": GREY}
_PARTS = {
    "compute": ("busy", BLUE),
    "wait_others": ("waiting for others", YELLOW),
    "wait_data": ("waiting for data", "#f4a261"),
    "sum": ("summing", GREEN),
    "update": ("updating", RED),
}


def require_matplotlib() -> Any:
    """Return matplotlib's pyplot, set to draw without a display.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("a picture needs matplotlib: pip install 'evenstep[bench]'") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


@contextlib.contextmanager
def canvas(columns: int = 1, *, size: tuple[float, float]) -> Iterator[tuple[Any, Any]]:
    """Open a figure of `size` inches, with a row of axes, and close it in the end."""
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(1, columns, figsize=size, layout="constrained")
    try:
        yield figure, axes
    finally:
        pyplot.close(figure)


def save(figure: Any, file: Path, dpi: int = 120) -> None:
    """Write a figure in the format that the file's suffix names.

    Raises:
        InputError: matplotlib doesn't know the format, or the file can't be written.
    """
    content = io.BytesIO()
    try:
        figure.savefig(content, dpi=dpi, format=file.suffix.removeprefix(".") or None)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, content.getvalue())
    except (OSError, ValueError) as error:
        raise InputError(f"the picture {file} can't be written: {error}") from error


def to_svg(figure: Any) -> str:
    """Return a figure as SVG; the same figure always gives the same text."""
    file = io.StringIO()
    with require_matplotlib().rc_context({"svg.hashsalt": "evenstep"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def to_png(figure: Any, dpi: int = 100) -> bytes:
    """Return a figure as PNG."""
    content = io.BytesIO()
    figure.savefig(content, dpi=dpi, format="png")
    return content.getvalue()


def draw_scaling(document: Mapping[str, Any], file: Path) -> None:
    """Draw speed-ups beside the ideal line, and where the devices' time went."""
    same, grown = (scaled(document, same_batch=same) for same in (True, False))
    least, most = same[0].devices, same[-1].devices
    with canvas(2, size=(11, 4)) as (figure, (left, right)):
        left.plot([least, most], [1, most / least], ":", color="grey", label="ideal")
        for rows, label, colour in (
            (same, "the same batch", BLUE),
            (grown, "a batch that grows", RED),
        ):
            speed_ups = [row.speed_up for row in rows]
            left.errorbar(
                [row.devices for row in rows],
                [one.median for one in speed_ups],
                yerr=_errors(speed_ups),
                fmt="o-",
                capsize=3,
                color=colour,
                label=label,
            )
        left.set_xticks([row.devices for row in same])
        left.set(xlabel="devices", ylabel="speed-up", title=_title(document))
        left.legend()
        _draw_shares(right, [*same, *grown[1:]])
        save(figure, file)


def draw_spans(
    axes: Any, row: int, spans: Sequence[Mapping[str, Any]], colour: str, height: float, edge: float
) -> None:
    """Draw a row of bars in milliseconds, from "began_s" to "ended_s" of each span."""
    bars = [(1e3 * one["began_s"], 1e3 * (one["ended_s"] - one["began_s"])) for one in spans]
    look = {"color": colour, "edgecolor": "white", "linewidth": edge}
    axes.broken_barh(bars, (row - height / 2, height), **look)


def draw_stages(visits: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw one step of a network in stages: what each stage computes when, and the bubble.

    Args:
        visits: of each visit of a shard to a stage, "shard", "stage", "backward", "began_s" and
            "ended_s", in seconds from the step's begin.
        file: the picture.
    """
    stages = 1 + max(one["stage"] for one in visits)
    last_ms = 1e3 * max(one["ended_s"] for one in visits)
    bubble = {"facecolor": "white", "edgecolor": GREY, "hatch": "//"}
    with canvas(size=(9, 0.7 * stages + 1.4)) as (figure, axes):
        for stage in range(stages):
            own = [one for one in visits if one["stage"] == stage]
            first_ms = 1e3 * min(one["began_s"] for one in own)
            end_ms = 1e3 * max(one["ended_s"] for one in own)
            idle = [(0, first_ms), (end_ms, last_ms - end_ms)]
            axes.broken_barh(idle, (stage - 0.4, 0.8), **bubble)
            for backward, colour in ((False, BLUE), (True, GREEN)):
                bars = [one for one in own if one["backward"] == backward]
                draw_spans(axes, stage, bars, colour, 0.8, 0.6)
            for one in own:
                middle_ms = 1e3 * (one["began_s"] + one["ended_s"]) / 2
                look = {"color": "white", "ha": "center", "va": "center"}
                axes.text(middle_ms, stage, one["shard"], **look)
        for label, colour in (("forward", BLUE), ("backward", GREEN)):
            axes.plot([], [], "s", color=colour, label=f"a shard, {label}")
        axes.fill([], [], label="the bubble", **bubble)
        axes.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
        axes.set(xlabel="ms", xlim=(0, last_ms))
        axes.invert_yaxis()
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        save(figure, file)


def draw_peers(document: Mapping[str, Any], file: Path) -> None:
    """Draw each contender's speed as a bar, the fastest on top."""
    found = {one["label"]: speeds(document["runs"], one["key"]) for one in document["contenders"]}
    rows = [(summarise([*speed.values()]), label) for label, speed in found.items() if speed]
    rows.sort(key=lambda row: row[0].median)
    with canvas(size=(8, 0.5 * len(rows) + 1.2)) as (figure, axes):
        axes.barh(
            [label for _, label in rows],
            [speed.median for speed, _ in rows],
            xerr=_errors([speed for speed, _ in rows]),
            color=[BLUE if label.startswith("evenstep") else GREY for _, label in rows],
            capsize=3,
        )
        axes.set(xlabel="examples/s", title=_title(document))
        save(figure, file)


def _errors(values: Sequence[Summary]) -> list[list[float]]:
    """Return the distances from the medians down and up to the extremes."""
    return [[one.median - one.least for one in values], [one.most - one.median for one in values]]


def _draw_shares(axes: Any, rows: Sequence[Scaled]) -> None:
    names = [f"{row.devices} × {row.examples // row.devices}" for row in rows]
    bottoms = [0.0] * len(rows)
    for part, (label, colour) in _PARTS.items():
        heights = [100 * row.shares[part] for row in rows]
        axes.bar(names, heights, bottom=bottoms, label=label, color=colour)
        bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
    axes.set(xlabel="devices × examples for each", ylabel="% of the devices' time")
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")


def _title(document: Mapping[str, Any]) -> str:
    first = document["contenders"][0]
    return f"{first['network']}, batch {first['examples']}, V = {first.get('shards', 8)}"
