"""Shows a training while it runs: a progress bar, and a curve in a notebook."""

from __future__ import annotations

import importlib.util
import io
import time
import warnings
from typing import Any

from evenstep.callbacks.callback import Callback, StepRecord
from evenstep.errors import InputError
from evenstep.options.checks import check_positive

_MOST_POINTS = 2_000
_MOST_SHARE = 0.1  # of the time


class ProgressBar(Callback):
    """A bar with the steps and the loss: a widget in a notebook with ipywidgets, else a line.

    Args:
        total: the number of steps of the training; None if it is not known.
    """

    def __init__(self, total: int | None = None) -> None:
        self._total = total
        self._bar: Any = None

    def open(self, step: int) -> None:
        """Show the bar."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="IProgress not found")  # then it is text
            from tqdm.auto import tqdm

            self._bar = tqdm(total=self._total, initial=step, unit="step", mininterval=0.2)

    def on_step(self, record: StepRecord) -> None:
        """Move the bar."""
        self._bar.set_postfix_str(f"epoch {record.epoch + 1}, loss {record.loss:.4f}", False)
        self._bar.update()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


class LiveCurve(Callback):
    """Draws the loss over the steps while a notebook's cell runs, in one picture.

    Args:
        redraws_per_s: the largest number of redraws a second. There are fewer if drawing would
            take more than a tenth of the time.
    """

    def __init__(self, redraws_per_s: float = 2.0) -> None:
        check_positive("redraws_per_s", redraws_per_s)
        missing = [name for name in ("IPython", "matplotlib") if not importlib.util.find_spec(name)]
        if missing:
            raise InputError(
                f"a live curve needs {' and '.join(missing)}: pip install evenstep[notebooks]"
            )
        self._every_s = 1 / redraws_per_s
        self._due_s = 0.0
        self._steps: list[int] = []
        self._losses: list[float] = []
        self._stride = 1  # one in so many steps is drawn
        self._shown: Any = None

    def open(self, step: int) -> None:
        """Refuse to draw where nothing can show a picture."""
        from IPython import get_ipython

        if get_ipython() is None:
            raise InputError("a live curve needs a notebook: leave LiveCurve out elsewhere")

    def on_step(self, record: StepRecord) -> None:
        """Add a point, and draw if it is time."""
        if record.step % self._stride:
            return
        self._steps.append(record.step)
        self._losses.append(record.loss)
        if len(self._steps) > _MOST_POINTS:
            self._stride *= 2
            self._steps, self._losses = self._steps[1::2], self._losses[1::2]
        began_s = time.monotonic()
        if began_s >= self._due_s:
            self._draw()
            ended_s = time.monotonic()
            self._due_s = ended_s + max(self._every_s, (ended_s - began_s) / _MOST_SHARE)

    def close(self) -> None:
        """Draw the last points."""
        if self._steps:
            self._draw()

    def _draw(self) -> None:
        from IPython import display
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.5, 2.5), layout="constrained")
        axes = figure.subplots()
        axes.plot(self._steps, self._losses)
        axes.set(xlabel="step", ylabel="loss")
        axes.grid()
        picture = io.BytesIO()
        FigureCanvasAgg(figure).print_png(picture)  # type: ignore[no-untyped-call]
        image = display.Image(picture.getvalue())
        if self._shown is None:
            self._shown = display.display(image, display_id=True)
        else:
            self._shown.update(image)
