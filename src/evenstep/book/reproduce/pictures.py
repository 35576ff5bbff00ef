"""The report's pictures, as the book draws them: accuracies, speed-ups, and what lanes did."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evenstep.bench.pictures import require_matplotlib
from evenstep.book.reproduce.plan import Figures
from evenstep.book.reproduce.training_experiments import (
    BOOK_LENET,
    BOOK_LENET_EPOCH_S,
    BOOK_RESNET,
    BOOK_RESNET_EPOCH_S,
)

_BLUE, _RED, _GREEN, _YELLOW, _GREY = "#2a6f97", "#b56576", "#8ab17d", "#e9c46a", "#adb5bd"
_COLOURS = {"compute": _BLUE, "sum": _GREEN, "update": _RED}


def draw(name: str, figures: Figures) -> str | None:
    """Return a picture as SVG; None where its figures are missing."""
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    try:
        if not _DRAWN[name](axes, figures):
            return None
        file = io.StringIO()
        # Without its date and with names that don't change, the same figures are the same file.
        with pyplot.rc_context({"svg.hashsalt": "evenstep"}):
            figure.savefig(file, format="svg", metadata={"Date": None})
        return file.getvalue()
    finally:
        pyplot.close(figure)


def title(name: str) -> str:
    """Return what a picture shows, in a line."""
    return _TITLES[name]


_TITLES = {
    "lenet_accuracies": "LeNet on Fashion-MNIST: one device and two lie on one line",
    "resnet18_accuracies": "ResNet-18 on Fashion-MNIST, batch 512",
    "sixteen_accuracies": "LeNet with the batch of sixteen devices (4,096), V = 16",
    "speed_ups": "Speed-up of two devices over one, and the ideal line",
    "lanes": "What two devices did during three steps of LeNet",
}


def _lenet_accuracies(axes: Any, figures: Figures) -> bool:
    for devices, style in ((1, ":"), (2, "--")):
        _curve(axes, BOOK_LENET[devices], f"the book, {_gpus(devices)}", style, _GREY)
    drawn = [
        _curve(axes, _accuracies(figures, key), label, style, colour)
        for key, label, style, colour in (
            ("lenet.book.1", "the book's rate, 1 device", "-", _RED),
            ("lenet.book.2", "the book's rate, 2 devices", "o", _RED),
            ("lenet.mended.1", "mended, 1 device", "-", _BLUE),
            ("lenet.mended.2", "mended, 2 devices", "o", _BLUE),
        )
    ]
    return _finish(axes, drawn)


def _resnet18_accuracies(axes: Any, figures: Figures) -> bool:
    for devices, style in ((1, ":"), (2, "--")):
        _curve(axes, BOOK_RESNET[devices], f"the book, {_gpus(devices)}", style, _GREY)
    drawn = [
        _curve(axes, _accuracies(figures, key), label, "o-", colour)
        for key, label, colour in (
            ("resnet18.book.1", "batch 256, rate 0.1", _YELLOW),
            ("resnet18.book.2", "batch 512, rate 0.2", _RED),
            ("resnet18.mended.2", "batch 512, rate 0.2, warmed up, then falling", _BLUE),
        )
    ]
    return _finish(axes, drawn)


def _sixteen_accuracies(axes: Any, figures: Figures) -> bool:
    drawn = [
        _curve(axes, _accuracies(figures, f"sixteen.{key}"), label, "o-", colour)
        for key, label, colour in (
            ("one", "batch 256, rate 0.1", _GREY),
            ("same_rate", "batch 4,096, rate 0.1", _YELLOW),
            ("linear", "batch 4,096, rate 1.6, warmed up", _RED),
            ("root", "batch 4,096, rate 0.4, warmed up", _BLUE),
        )
    ]
    return _finish(axes, drawn)


def _speed_ups(axes: Any, figures: Figures) -> bool:
    axes.plot([1, 2], [1, 2], ":", color="grey", label="ideal")
    for label, seconds, marker in (
        ("LeNet, the book's GPUs", BOOK_LENET_EPOCH_S, "v"),
        ("ResNet-18, the book's GPUs (twice the batch)", BOOK_RESNET_EPOCH_S, "^"),
    ):
        speed_up = seconds[1] / seconds[2]
        axes.plot([1, 2], [1, speed_up], marker + "--", color=_GREY, label=label)
    drawn = []
    for network, colour in (("lenet", _BLUE), ("resnet18", _RED)):
        one, two = (_epoch_s(figures, f"{network}.book.{devices}") for devices in (1, 2))
        if one is not None and two is not None:
            axes.plot([1, 2], [1, one / two], "o-", color=colour, label=f"{network}, here")
            drawn.append(True)
    axes.set_xticks([1, 2])
    axes.set(xlabel="devices", ylabel="speed-up", xlim=(0.9, 2.1), ylim=(0, 2.5))
    axes.legend(fontsize="small")
    return any(drawn)


def _lanes(axes: Any, figures: Figures) -> bool:
    spans: Sequence[Mapping[str, Any]] = figures.get("lenet.book.2", {}).get("timeline", ())
    devices = sorted({span["device"] for span in spans})
    for category, colour in _COLOURS.items():
        for row, device in enumerate(devices):
            bars = [
                (1e3 * span["began_s"], 1e3 * (span["ended_s"] - span["began_s"]))
                for span in spans
                if span["device"] == device and span["category"] == category
            ]
            height = 0.5 if category == "sum" else 0.8
            axes.broken_barh(
                bars, (row - height / 2, height), color=colour, edgecolor="white", linewidth=0.4
            )
    handles = [axes.plot([], [], "s", color=colour)[0] for colour in _COLOURS.values()]
    axes.legend(
        handles,
        ["a shard, forward and backward", "a sum of the tree", "update"],
        loc="upper center",
        bbox_to_anchor=(0.5, 1.16),
        ncols=3,
        fontsize="small",
    )
    axes.set_yticks(range(len(devices)), devices)
    axes.set(xlabel="ms")
    axes.invert_yaxis()
    return bool(spans)


_DRAWN: dict[str, Callable[[Any, Figures], bool]] = {
    "lenet_accuracies": _lenet_accuracies,
    "resnet18_accuracies": _resnet18_accuracies,
    "sixteen_accuracies": _sixteen_accuracies,
    "speed_ups": _speed_ups,
    "lanes": _lanes,
}


def _curve(axes: Any, values: Sequence[float], label: str, style: str, colour: str) -> bool:
    if values:
        epochs = range(1, len(values) + 1)
        axes.plot(epochs, values, style, color=colour, label=label, markersize=4)
    return bool(values)


def _finish(axes: Any, drawn: Sequence[bool]) -> bool:
    axes.set(xlabel="epoch", ylabel="test accuracy", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize="small", loc="best")
    return any(drawn)


def _accuracies(figures: Figures, key: str) -> Sequence[float]:
    found: Sequence[float] = figures.get(key, {}).get("accuracies", ())
    return found


def _epoch_s(figures: Figures, key: str) -> float | None:
    seconds = figures.get(key, {}).get("seconds")
    return sum(seconds) / len(seconds) if seconds else None


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' * (count != 1)}"
