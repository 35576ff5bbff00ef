"""What a person sees of a training run: a live view on a terminal, plain lines on a pipe."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from evenstep.cli.progress import Progress

_LINE_EVERY_S = 10.0
_REDRAW_EVERY_S = 0.1
_SHOWN_DEVICES = 8


class Display(contextlib.AbstractContextManager["Display"], Protocol):
    """What `train` needs of a display."""

    def show(self, progress: Progress) -> None:
        """Show where the run is; called after every step."""
        ...

    def say(self, text: str) -> None:
        """Print a line."""
        ...


def open_display(console: Console) -> Display:
    """Return the display that fits `console`."""
    if console.file.isatty() and console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console)
    return PlainDisplay(console)


class PlainDisplay:
    """A line at the end of each epoch, and every ten seconds within one."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed_at = time.monotonic()

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing to put away."""

    def show(self, progress: Progress) -> None:
        """Print a line if one is due."""
        now = time.monotonic()
        if progress.ends_epoch or now - self._printed_at >= _LINE_EVERY_S:
            self._printed_at = now
            self.say(f"{describe(progress)}  {_busy(progress)}  {clock(progress.left_s)} left")

    def say(self, text: str) -> None:
        """Print a line."""
        print_line(self._console, text)


class LiveDisplay:
    """A view that is redrawn in place, under a line for each epoch that has ended.

    It is drawn between steps, in the thread that trains: no thread of its own takes time.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn_at = 0.0

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Take the view away; the lines stay."""
        self._live.stop()

    def show(self, progress: Progress) -> None:
        """Redraw the view, at most ten times a second."""
        if progress.ends_epoch:
            self.say(describe(progress))
        now = time.monotonic()
        if now - self._drawn_at >= _REDRAW_EVERY_S:
            self._drawn_at = now
            self._live.update(draw(progress), refresh=True)

    def say(self, text: str) -> None:
        """Print a line above the view."""
        print_line(self._console, text)


def describe(progress: Progress) -> str:
    """Say in a line where the run is."""
    goal = progress.goal
    return (
        f"epoch {progress.epoch:>{len(str(goal.epochs))}}/{goal.epochs}  "
        f"step {progress.step:>{len(str(goal.steps))}}/{goal.steps}  "
        f"loss {_number(progress.loss, '.4f')}  "
        f"{_number(progress.examples_per_s, ',.0f')} examples/s"
    )


def draw(progress: Progress) -> RenderableType:
    """Draw the live view: a bar for the whole run, and one for each device's busy share."""
    goal = progress.goal
    bars = Table.grid(padding=(0, 2))
    bars.add_column(no_wrap=True)
    bars.add_column(max_width=24)
    bars.add_column(no_wrap=True)
    done = ProgressBar(total=goal.steps, completed=progress.step)
    bars.add_row(f"step {progress.step}/{goal.steps}", done, f"{clock(progress.left_s)} left")
    for name, share in list(zip(goal.devices, progress.busy, strict=True))[:_SHOWN_DEVICES]:
        bars.add_row(name, ProgressBar(total=1, completed=share), f"{share:.0%} busy")
    others = progress.busy[_SHOWN_DEVICES:]
    if others:
        mean = sum(others) / len(others)
        bars.add_row(
            f"{len(others)} more",
            ProgressBar(total=1, completed=mean),
            f"{mean:.0%} busy",
        )
    return Group(Text(describe(progress), no_wrap=True), bars)


def print_table(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Print labels and values; a value is never cut or broken, however narrow the terminal."""
    width = max(len(label) for label, _ in rows)
    for label, value in rows:
        print_line(console, Text.assemble((f"{label:<{width}}", "bold"), "  ", value))


def print_line(console: Console, text: str | Text) -> None:
    """Print `text` as it is: no wrapping, no cutting, no markup."""
    console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)


def clock(seconds: float) -> str:
    """Spell a duration as 0:00:12."""
    return str(timedelta(seconds=round(seconds)))


def _busy(progress: Progress) -> str:
    shown = " ".join(f"{share:.0%}" for share in progress.busy[:_SHOWN_DEVICES])
    return f"busy {shown}" + (" ..." if len(progress.busy) > _SHOWN_DEVICES else "")


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
