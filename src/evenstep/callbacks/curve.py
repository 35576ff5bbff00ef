"""Draws curves of a training: in a notebook while it runs, on a terminal at its end."""

from __future__ import annotations

import importlib.util
import io
import sys
import time
from collections.abc import Mapping
from typing import Any

from evenstep.callbacks.callback import Callback, StepRecord
from evenstep.callbacks.terminal_curve import curve_lines
from evenstep.errors import InputError
from evenstep.options.checks import check_positive

_MOST_POINTS = 2_000
_MOST_SHARE = 0.1  # of the time


def in_notebook() -> bool:
    """Whether a notebook's kernel runs the program, so that pictures can be shown."""
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def is_a_terminal(stream: Any) -> bool:
    """Whether somebody sees what is written to a stream; a program without a console has None."""
    return hasattr(stream, "isatty") and bool(stream.isatty())


class LiveCurve(Callback):
    """Draws the loss over the steps, and numbers that are added.

        curve = evenstep.callbacks.LiveCurve()
        with evenstep.Trainer(model, optimizer, loss, callbacks=[curve]) as trainer:
            for X, y in trainer.epoch(loader):
                trainer.step(X, y)
            found = trainer.evaluate(test_batches, {"accuracy": evenstep.metrics.accuracy})
            curve.add(trainer.steps_done, found)

    In a notebook there is one picture, which is drawn again while the cell runs: losses on the left
    axis, all other numbers on the right one. On a terminal, curves of characters are printed when
    the trainer is closed. Where standard output is a file or a pipe, nothing is drawn.

    Args:
        redraws_per_s: the largest number of redraws a second. There are fewer if drawing would
            take more than a tenth of the time.
    """

    def __init__(self, redraws_per_s: float = 2.0) -> None:
        check_positive("redraws_per_s", redraws_per_s)
        self._every_s = 1 / redraws_per_s
        self._due_s = 0.0
        self._curves: dict[str, _Curve] = {"loss": _Curve()}
        self._shown: Any = None

    def open(self, step: int) -> None:
        """Refuse to draw in a notebook without a library that draws."""
        if in_notebook() and importlib.util.find_spec("matplotlib") is None:
            raise InputError("a live curve needs matplotlib: pip install evenstep[notebooks]")

    def on_step(self, record: StepRecord) -> None:
        """Add a point, and draw if it is time."""
        self._curves["loss"].add(record.step, record.loss)
        self._draw_if_due()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Draw numbers of your own, such as an accuracy, each in a curve with its name.

        Args:
            step: where they belong, such as `trainer.steps_done`.
            values: the numbers by name. A name with "loss" in it is drawn beside the loss.
        """
        for name, value in values.items():
            self._curves.setdefault(name, _Curve()).add(step, float(value))
        self._draw_if_due()

    def close(self) -> None:
        """Draw the last points; on a terminal, print the curves."""
        if in_notebook():
            self._draw()
        elif is_a_terminal(sys.stdout):
            for name, curve in self._curves.items():
                encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
                for line in curve_lines(name, curve.steps, curve.values, encoding):
                    print(line)

    def _draw_if_due(self) -> None:
        began_s = time.monotonic()
        if in_notebook() and began_s >= self._due_s:
            self._draw()
            ended_s = time.monotonic()
            self._due_s = ended_s + max(self._every_s, (ended_s - began_s) / _MOST_SHARE)

    def _draw(self) -> None:
        from IPython import display
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.5, 2.5), layout="constrained")
        losses = figure.subplots()
        losses.set(xlabel="step", ylabel="loss")
        losses.grid()
        others = losses.twinx() if any("loss" not in name for name in self._curves) else None
        for number, (name, curve) in enumerate(self._curves.items()):
            axes = losses if others is None or "loss" in name else others
            line = ".-" if curve.is_short else "-"
            axes.plot(curve.steps, curve.values, line, color=f"C{number}", label=name)
        if len(self._curves) > 1:
            figure.legend(loc="outside upper center", ncols=len(self._curves))
        picture = io.BytesIO()
        FigureCanvasAgg(figure).print_png(picture)  # type: ignore[no-untyped-call]
        image = display.Image(picture.getvalue())
        if self._shown is None:
            self._shown = display.display(image, display_id=True)
        else:
            self._shown.update(image)


class _Curve:
    """The points of a curve; of many, one in so many is kept.

    Attributes:
        steps: their steps.
        values: their values.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: list[float] = []
        self._stride = 1
        self._number = 0

    @property
    def is_short(self) -> bool:
        """Whether the points are few enough to be shown one by one."""
        return len(self.steps) <= 50

    def add(self, step: int, value: float) -> None:
        """Add a point."""
        self._number += 1
        if self._number % self._stride:
            return
        self.steps.append(step)
        self.values.append(value)
        if len(self.steps) > _MOST_POINTS:
            self._stride *= 2
            self.steps, self.values = self.steps[1::2], self.values[1::2]
