"""The pictures of the report: accuracies, speed-ups, and what the devices did."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from evenstep.bench.pictures import BLUE, COLOURS, GREEN, GREY, RED, canvas, draw_spans, to_svg
from evenstep.errors import counted
from evenstep.reproduce.experiments import descriptions
from evenstep.reproduce.plan import Figures

_PICTURES: Mapping[str, Mapping[str, Any]] = {
    name: {**picture, "book": description.get("book_accuracies", {})}
    for description in descriptions().values()
    for name, picture in description.get("pictures", {}).items()
}
TITLES = {name: picture["title"] for name, picture in _PICTURES.items()}

_LANES = {
    "compute": ("a shard, forward and backward", BLUE),
    "sum": ("a sum of the tree", GREEN),
    "update": ("update", RED),
}


def draw(name: str, figures: Figures) -> str | None:
    """Return a picture as SVG; None if none of its figures has been measured."""
    drawing = {"speed_ups": _speed_ups, "lanes": _lanes}
    make = drawing.get(name, functools.partial(_accuracies, _PICTURES[name]))
    with canvas(size=(5, 4.4)) as (figure, axes):  # readable when it is 390 pixels wide
        if not make(axes, figures):
            return None
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=1)
        return to_svg(figure)


def _accuracies(picture: Mapping[str, Any], axes: Any, figures: Figures) -> bool:
    """Draw the book's curves by number of GPUs, and those that were measured."""
    found = [curve for curve in picture["curves"] if curve[0] in figures]
    curves = [
        (values, f"the book, {counted(int(gpus), 'GPU')}", {"1": ":", "2": "--"}[gpus], "grey")
        for gpus, values in picture["book"].items()
    ] + [(figures[key]["accuracies"], *look) for key, *look in found]
    for values, label, style, colour in curves:
        epochs = range(1, len(values) + 1)
        axes.plot(epochs, values, style, color=COLOURS[colour], label=label, markersize=4)
    axes.set(xlabel="epoch", ylabel="test accuracy", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    return bool(found)


def _speed_ups(axes: Any, figures: Figures) -> bool:
    axes.plot([1, 2], [1, 2], ":", color="grey", label="ideal")
    for label, network, marker in (
        ("LeNet, the book's GPUs", "lenet", "v"),
        ("ResNet-18, the book's GPUs (twice the batch)", "resnet18", "^"),
    ):
        one, two = descriptions()[network]["book_epoch_s"]
        axes.plot([1, 2], [1, one / two], marker + "--", color=GREY, label=label)
    is_drawn = False
    for network, colour in (("lenet", BLUE), ("resnet18", RED)):
        one, two = (figures.get(f"{network}.book.{count}", {}).get("seconds") for count in (1, 2))
        if one and two:
            speed_up = statistics.fmean(one) / statistics.fmean(two)
            axes.plot([1, 2], [1, speed_up], "o-", color=colour, label=f"{network}, here")
            is_drawn = True
    axes.set_xticks([1, 2])
    axes.set(xlabel="devices", ylabel="speed-up", xlim=(0.9, 2.1), ylim=(0, 2.5))
    return is_drawn


def _lanes(axes: Any, figures: Figures) -> bool:
    spans: Sequence[Mapping[str, Any]] = figures.get("lenet.book.2", {}).get("timeline", ())
    devices = sorted({span["device"] for span in spans})
    for category, (label, colour) in _LANES.items():
        height = 0.5 if category == "sum" else 0.8
        for row, device in enumerate(devices):
            own = [one for one in spans if (one["device"], one["category"]) == (device, category)]
            draw_spans(axes, row, own, colour, height, 0.4)
        axes.plot([], [], "s", color=colour, label=label)
    axes.set_yticks(range(len(devices)), devices)
    axes.set(xlabel="ms")
    axes.invert_yaxis()
    return bool(spans)
