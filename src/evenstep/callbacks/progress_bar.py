"""A progress bar while a model trains. What the program prints meanwhile appears above it."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any, TextIO

from evenstep.callbacks.callback import Callback, EpochRecord, EpochStart, StepRecord
from evenstep.callbacks.curve import in_notebook, is_a_terminal

_SHOWN_DEVICES = 4


class ProgressBar(Callback):
    """A bar with the steps, the time that is left, the loss, and how busy the devices were.

        with evenstep.Trainer(model, optimizer, loss, callbacks=[ProgressBar()]) as trainer:
            for X, y in trainer.epoch(loader):
                trainer.step(X, y)

    Each epoch of `trainer.epoch` has a bar of its own; at its end the bar shows the epoch's mean
    loss. With `total` there is one bar for the whole training. In a notebook with ipywidgets it is
    a widget. On a terminal it is a line, and what is printed or logged meanwhile appears above it.
    Where standard error is a file or a pipe, nothing is shown.

    Args:
        total: the number of steps of the whole training; None for a bar for each epoch.
    """

    def __init__(self, total: int | None = None) -> None:
        self._total = total
        self._bar: Any = None
        self._is_shown = False
        self._streams: list[_Above] = []
        self._seconds = 0.0
        self._busy: dict[str, float] = {}  # seconds

    def open(self, step: int) -> None:
        """Show the bar of the whole training, if there is one."""
        is_terminal = is_a_terminal(sys.stderr) and not in_notebook()
        self._is_shown = is_terminal or in_notebook()
        names = [one for one in ("stdout", "stderr") if is_a_terminal(getattr(sys, one))]
        self._streams = [_Above(name) for name in names] if is_terminal else []
        if self._total is not None:
            self._show(self._total, step)

    def on_epoch_start(self, start: EpochStart) -> None:
        """Show the bar of the epoch."""
        if self._total is None:
            self._end()
            self._show(start.steps, start.first, f"epoch {start.epoch + 1}")

    def on_step(self, record: StepRecord) -> None:
        """Move the bar."""
        if self._bar is None:  # a loop without `trainer.epoch`
            self._show(None, record.step - 1)
        self._seconds += record.seconds
        for device, share in record.busy.items():
            self._busy[device] = self._busy.get(device, 0.0) + share * record.seconds
        epoch = "" if self._total is None else f"epoch {record.epoch + 1}, "
        self._bar.set_postfix_str(f"{epoch}loss {record.loss:.4f}{self._busy_text()}", False)
        self._bar.update()

    def on_epoch(self, record: EpochRecord) -> None:
        """End the epoch's bar, with the mean loss."""
        if self._total is None and self._bar is not None:
            if record.loss is not None:
                self._bar.set_postfix_str(f"mean loss {record.loss:.4f}{self._busy_text()}", False)
            self._end()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._end()
        for stream in self._streams:
            stream.remove()
        self._streams = []

    def _show(self, total: int | None, done: int, name: str | None = None) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="IProgress not found")  # then it is text
            from tqdm.auto import tqdm

            self._bar = tqdm(
                total=total, initial=done, desc=name, unit=" steps", mininterval=0.2,
                dynamic_ncols=True, disable=not self._is_shown,
                file=next((one.stream for one in self._streams if one.name == "stderr"), None),
            )  # fmt: skip
        self._seconds, self._busy = 0.0, {}
        for stream in self._streams:
            stream.bar = self._bar

    def _end(self) -> None:
        if self._bar is not None:
            for stream in self._streams:
                stream.finish_line()
                stream.bar = None
            self._bar.close()
            self._bar = None

    def _busy_text(self) -> str:
        if not self._seconds:
            return ""
        shares = [f"{busy_s / self._seconds:.0%}" for busy_s in self._busy.values()]
        more = ["..."] * (len(shares) > _SHOWN_DEVICES)
        return ", busy " + " ".join([*shares[:_SHOWN_DEVICES], *more])


class _Above:
    """Stands in for `sys.stdout` or `sys.stderr` on a terminal: its lines appear above the bar.

    What keeps it, such as a handler of `logging`, may go on writing to it after it was removed.

    Attributes:
        name: which of the two it is.
        stream: the stream that it writes to.
        bar: the bar; None while there is none.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.stream: TextIO = getattr(sys, name)
        self.bar: Any = None
        self._line = ""
        self._handlers = [
            one
            for one in logging.root.handlers
            if isinstance(one, logging.StreamHandler) and one.stream is self.stream
        ]
        for handler in self._handlers:
            handler.setStream(self)
        setattr(sys, name, self)

    def remove(self) -> None:
        """Put the stream back, unless somebody else has replaced it meanwhile."""
        for handler in self._handlers:
            if handler.stream is self:
                handler.setStream(self.stream)
        if getattr(sys, self.name) is self:
            setattr(sys, self.name, self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        if self.bar is None:
            return self.stream.write(text)
        lines, newline, self._line = (self._line + text).rpartition("\n")
        if newline:
            with self.bar.get_lock():
                self.bar.clear(nolock=True)
                self.stream.write(lines + newline)
                self.stream.flush()
                self.bar.refresh(nolock=True)
        return len(text)

    def finish_line(self) -> None:
        """End a line that was begun while the bar was there."""
        if self._line:
            self.write("\n")
