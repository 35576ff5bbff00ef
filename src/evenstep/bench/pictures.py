"""Pictures of results, by matplotlib: PNG, SVG or whatever else the file's name asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evenstep.bench.rounds import summarise
from evenstep.bench.tables import Scaled, scaled, speeds
from evenstep.errors import InputError

_SECONDS = {
    "compute": ("busy", "#2a6f97"),
    "wait_others": ("waiting for others", "#e9c46a"),
    "wait_data": ("waiting for data", "#f4a261"),
    "sum": ("summing", "#8ab17d"),
    "update": ("updating", "#b56576"),
}
_OURS, _THEIRS = "#2a6f97", "#adb5bd"


def require_matplotlib() -> Any:
    """Return matplotlib's pyplot, drawing into files.

    Raises:
        InputError: it is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("a picture needs matplotlib: pip install 'evenstep[bench]'") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def draw_scaling(document: Mapping[str, Any], file: Path) -> None:
    """Draw speed-ups against the ideal line, and where the devices' time went."""
    pyplot = require_matplotlib()
    same, grown = (scaled(document, same_batch=same) for same in (True, False))
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    least, most = same[0].devices, same[-1].devices
    left.plot([least, most], [1, most / least], ":", color="grey", label="ideal")
    for rows, label, colour in (
        (same, "the same batch", _OURS),
        (grown, "a batch that grows", "#b56576"),
    ):
        left.errorbar(
            [row.devices for row in rows],
            [row.speed_up.median for row in rows],
            yerr=[
                [row.speed_up.median - row.speed_up.least for row in rows],
                [row.speed_up.most - row.speed_up.median for row in rows],
            ],
            fmt="o-",
            capsize=3,
            color=colour,
            label=label,
        )
    left.set_xticks([row.devices for row in same])
    left.set(xlabel="devices", ylabel="speed-up", title=_title(document))
    left.legend()
    _draw_shares(right, [*same, *grown[1:]])
    _save(figure, file)
    pyplot.close(figure)


def draw_peers(document: Mapping[str, Any], file: Path) -> None:
    """Draw every contender's speed as a bar, the fastest on top."""
    pyplot = require_matplotlib()
    found = {one["key"]: speeds(document["runs"], one["key"]) for one in document["contenders"]}
    rows = [
        (summarise(list(found[one["key"]].values())), one["label"])
        for one in document["contenders"]
        if found[one["key"]]
    ]
    rows.sort(key=lambda row: row[0].median)
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(rows) + 1.2), layout="constrained")
    axes.barh(
        [label for _, label in rows],
        [speed.median for speed, _ in rows],
        xerr=[
            [speed.median - speed.least for speed, _ in rows],
            [speed.most - speed.median for speed, _ in rows],
        ],
        color=[_OURS if label.startswith("evenstep") else _THEIRS for _, label in rows],
        capsize=3,
    )
    axes.set(xlabel="examples/s", title=_title(document))
    _save(figure, file)
    pyplot.close(figure)


def _draw_shares(axes: Any, rows: Sequence[Scaled]) -> None:
    names = [f"{row.devices} × {row.examples // row.devices}" for row in rows]
    bottoms = [0.0] * len(rows)
    for part, (label, colour) in _SECONDS.items():
        heights = [100 * row.shares[part] for row in rows]
        axes.bar(names, heights, bottom=bottoms, label=label, color=colour)
        bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
    axes.set(xlabel="devices × examples for each", ylabel="% of the devices' time")
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")


def _title(document: Mapping[str, Any]) -> str:
    first = document["contenders"][0]
    return f"{first['network']}, batch {first['examples']}, V = {first.get('shards', 8)}"


def _save(figure: Any, file: Path) -> None:
    """Write a picture.

    Raises:
        InputError: matplotlib doesn't know the format, or the file can't be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise InputError(f"the picture {file} can't be written: {error}") from error
