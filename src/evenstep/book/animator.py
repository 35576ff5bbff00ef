"""Draws curves that grow during a training, as the book's `Animator` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evenstep.bench import pictures


class Animator:
    """Draws curves as they grow: live in a notebook, otherwise to a file. Needs matplotlib.

    Args:
        xlabel: label of the horizontal axis.
        ylabel: label of the vertical axis.
        legend: name of each curve.
        xlim: range of the horizontal axis; None to fit the curves.
        ylim: range of the vertical axis; None to fit the curves.
        xscale: "linear" or "log".
        yscale: "linear" or "log".
        fmts: matplotlib's format of each curve.
        figsize: size in inches.
        file: file that is written outside a notebook.

    Attributes:
        X, Y: coordinates of each curve's points.
    """

    def __init__(
        self,
        xlabel: str = "",
        ylabel: str = "",
        legend: Sequence[str] = (),
        xlim: Sequence[float] | None = None,
        ylim: Sequence[float] | None = None,
        xscale: str = "linear",
        yscale: str = "linear",
        fmts: Sequence[str] = ("-", "m--", "g-.", "r:"),
        figsize: tuple[float, float] = (3.5, 2.5),
        file: str | Path = "animator.png",
    ) -> None:
        self.X: list[list[float]] = []
        self.Y: list[list[float]] = []
        limits = {"xlim": xlim, "ylim": ylim}
        self._axes = {
            "xlabel": xlabel,
            "ylabel": ylabel,
            "xscale": xscale,
            "yscale": yscale,
            **{name: ends for name, ends in limits.items() if ends and ends[0] != ends[1]},
        }
        self._legend = legend
        self._fmts = fmts
        self._figsize = figsize
        self._file = Path(file)

    def add(self, x: float | Sequence[float], y: float | Sequence[float | None]) -> None:
        """Add a point to each curve and draw; None as `y` adds no point to its curve.

        Args:
            x: one number for all curves, or one for each.
            y: one number for each curve, or one for the only curve.
        """
        ys = list(y) if isinstance(y, Sequence) else [y]
        xs = list(x) if isinstance(x, Sequence) else [x] * len(ys)
        while len(self.X) < len(ys):
            self.X.append([])
            self.Y.append([])
        for number, (one, value) in enumerate(zip(xs, ys, strict=True)):
            if value is not None:
                self.X[number].append(float(one))
                self.Y[number].append(float(value))
        self._draw()

    def _draw(self) -> None:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=self._figsize, layout="constrained")
        axes = figure.subplots()
        for xs, ys, form in zip(self.X, self.Y, self._fmts, strict=False):
            axes.plot(xs, ys, form)
        axes.set(**self._axes)
        if self._axes["xscale"] == "linear" and all(x.is_integer() for xs in self.X for x in xs):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # no ticks between epochs
        axes.grid()
        if self._legend:
            axes.legend(self._legend)
        if _in_notebook():
            from IPython import display

            picture = display.Image(pictures.to_png(figure))  # a figure needs %matplotlib inline
            display.clear_output(wait=True)
            display.display(picture)
        else:
            pictures.save(figure, self._file, dpi=150)


def _in_notebook() -> bool:
    try:
        shell = get_ipython()  # type: ignore[name-defined]
    except NameError:
        return False
    return bool(shell.__class__.__name__ == "ZMQInteractiveShell")
