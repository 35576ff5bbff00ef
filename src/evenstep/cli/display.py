"""Shows the progress of a training: a live view on a terminal, plain lines on a pipe."""

from __future__ import annotations

import time
from datetime import timedelta

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from evenstep.cli.output import print_line
from evenstep.cli.progress import Progress

_LINE_EVERY_S = 10.0
_REDRAW_EVERY_S = 0.1
_SHOWN_DEVICES = 8


def open_display(console: Console) -> Display:
    """Return the display that suits `console`."""
    if console.file.isatty() and console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console)
    return Display(console)


class Display:
    """Prints a line at the end of each epoch, and every ten seconds within an epoch."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed_at = time.monotonic()

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop showing progress; printed lines stay."""

    def show(self, progress: Progress) -> None:
        """Show the progress; called after every step."""
        now = time.monotonic()
        if progress.ends_epoch or now - self._printed_at >= _LINE_EVERY_S:
            self._printed_at = now
            self.say(f"{describe(progress)}  {_busy(progress)}  {clock(progress.left_s)} left")

    def say(self, text: str) -> None:
        """Print a line."""
        print_line(self._console, text)


class LiveDisplay(Display):
    """A view that is redrawn in place, below a line for each epoch that has ended.

    It is drawn between steps in the thread that trains, so no further thread takes time from the
    devices.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._printed_at = 0.0  # the first step is drawn at once

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove the view; printed lines stay."""
        self._live.stop()

    def show(self, progress: Progress) -> None:
        """Redraw the view, at most ten times a second."""
        if progress.ends_epoch:
            self.say(describe(progress))
        now = time.monotonic()
        if now - self._printed_at >= _REDRAW_EVERY_S:
            self._printed_at = now
            self._live.update(draw(progress), refresh=True)


def describe(progress: Progress) -> str:
    """Return epoch, step, loss and speed in one line."""
    goal = progress.goal
    return (
        f"epoch {progress.epoch:>{len(str(goal.epochs))}}/{goal.epochs}  "
        f"step {progress.step:>{len(str(goal.steps))}}/{goal.steps}  "
        f"loss {_number(progress.loss, '.4f')}  "
        f"{_number(progress.examples_per_s, ',.0f')} examples/s"
    )


def draw(progress: Progress) -> RenderableType:
    """Return the live view: a bar for the training, and one for the busy share of each device."""
    goal, busy = progress.goal, progress.busy
    bars = Table.grid(padding=(0, 2))
    bars.add_column(no_wrap=True)
    bars.add_column(max_width=24)
    bars.add_column(no_wrap=True)
    done = ProgressBar(total=goal.steps, completed=progress.step)
    bars.add_row(f"step {progress.step}/{goal.steps}", done, f"{clock(progress.left_s)} left")
    shares = list(zip(goal.devices, busy, strict=True))[:_SHOWN_DEVICES]
    others = busy[_SHOWN_DEVICES:]
    if others:
        shares.append((f"{len(others)} more", sum(others) / len(others)))
    for name, share in shares:
        bars.add_row(name, ProgressBar(total=1, completed=share), f"{share:.0%} busy")
    return Group(Text(describe(progress), no_wrap=True), bars)


def clock(seconds: float) -> str:
    """Format a duration as 0:00:12."""
    return str(timedelta(seconds=round(seconds)))


def _busy(progress: Progress) -> str:
    shown = " ".join(f"{share:.0%}" for share in progress.busy[:_SHOWN_DEVICES])
    return f"busy {shown}" + (" ..." if len(progress.busy) > _SHOWN_DEVICES else "")


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
