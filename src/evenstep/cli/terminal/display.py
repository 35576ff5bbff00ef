"""Shows the progress of a training: a live view on a terminal, plain lines on a pipe."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment
from rich.table import Table
from rich.text import Text

from evenstep.cli.terminal.output import print_line
from evenstep.cli.terminal.progress import Progress

_LINE_EVERY_S = 10.0
_REDRAW_EVERY_S = 0.1
_SHOWN_DEVICES = 8
_STOPPING = "stopping after this step (press Ctrl-C again to stop at once)"


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
        self._is_writing = self._says_stopping_next = False

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop showing progress; printed lines stay."""

    def show(self, progress: Progress) -> None:
        """Show the progress; called after every step."""
        if time.monotonic() - self._printed_at >= _LINE_EVERY_S and not progress.ends_epoch:
            self._print(progress)

    def show_epoch(self, progress: Progress) -> None:
        """Print the progress and the test accuracy at the end of an epoch."""
        self._print(progress)

    def say(self, text: str) -> None:
        """Print a line."""
        with self._writing():
            print_line(self._console, text)

    def say_what_runs(self, text: str) -> None:
        """Say what is done now, before the next step."""
        self.say(text)

    def say_stopping(self) -> None:
        """Say that a signal was received: at once, or after the write that it interrupts."""
        if self._is_writing:
            self._says_stopping_next = True
        else:
            self.say(_STOPPING)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        self._is_writing = True
        try:
            yield
        finally:
            self._is_writing = False
        if self._says_stopping_next:
            self._says_stopping_next = False
            self.say(_STOPPING)

    def _print(self, progress: Progress) -> None:
        self._printed_at = time.monotonic()
        self.say(f"{describe(progress)}  {_busy(progress)}  {clock(progress.left_s)} left")


class LiveDisplay(Display):
    """A view that is redrawn in place, below a line for each epoch that has ended.

    It is drawn between steps in the thread that trains, so no further thread takes time from the
    devices.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._printed_at = 0.0  # the first step is drawn at once
        self._view: RenderableType = ""
        self._width = console.width

    def __enter__(self) -> LiveDisplay:
        with self._writing():
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove the view; printed lines stay."""
        with self._writing():
            self._live.stop()

    def show(self, progress: Progress) -> None:
        """Redraw the view, at most ten times a second."""
        now = time.monotonic()
        if now - self._printed_at >= _REDRAW_EVERY_S:
            self._printed_at = now
            self._redraw(draw(progress))

    def show_epoch(self, progress: Progress) -> None:
        """Print a line above the view."""
        self.say(describe(progress))

    def say(self, text: str) -> None:
        """Print a line above the view."""
        with self._writing():
            self._follow_width()
            print_line(self._console, text)

    def say_what_runs(self, text: str) -> None:
        """Show it in the place of the view."""
        self._redraw(Text(text, no_wrap=True))

    def _redraw(self, view: RenderableType) -> None:
        with self._writing():
            self._follow_width()
            self._view = view
            self._live.update(view, refresh=True)

    def _follow_width(self) -> None:
        """After the terminal became narrower, erase the rows into which it broke the view's lines.

        rich erases as many rows as the view had when it was drawn.
        """
        width, before = self._console.width, self._width
        self._width = width
        options = self._console.options.update(width=before)
        lines = self._console.render_lines(self._view, options, pad=False)
        rows = broken_rows([Segment.get_line_length(line) for line in lines], width)
        erase_row = Control((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1))
        self._console.control(*[erase_row] * (rows - len(lines)))


def broken_rows(lengths: Sequence[int], width: int) -> int:
    """Return the number of rows that lines take on a terminal of `width` columns."""
    return sum(max(1, math.ceil(length / width)) for length in lengths)


def describe(progress: Progress) -> str:
    """Return epoch, step, loss, speed, and after an epoch the test accuracy, in one line."""
    goal, accuracy = progress.goal, progress.test_accuracy
    tested = "" if accuracy is None else f"test accuracy {accuracy:.4f}  "
    return (
        f"epoch {progress.epoch:>{len(str(goal.epochs))}}/{goal.epochs}  "
        f"step {progress.step:>{len(str(goal.steps))}}/{goal.steps}  "
        f"loss {_number(progress.loss, '.4f')}  {tested}"
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
