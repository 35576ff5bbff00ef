"""Prints log messages and warnings of the library on stderr, each of them once."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

import click

from evenstep.cli.options.training import spell_options

_LOGGER = logging.getLogger("evenstep")


class NoteHandler(logging.Handler):
    """Prints each message once, as `note: ...`."""

    def __init__(self) -> None:
        super().__init__()
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record's message."""
        self.note(record.getMessage())

    def note(self, message: str) -> None:
        """Print a message, unless it has been printed before."""
        if message not in self._printed:
            self._printed.add(message)
            click.echo(f"note: {spell_options(message)}", err=True)


@contextlib.contextmanager
def notes_on_stderr() -> Iterator[None]:
    """Inside `with`, print the library's log messages and warnings as lines on stderr."""
    handler = NoteHandler()
    propagate = _LOGGER.propagate
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *place, **more: handler.note(str(message))
        _LOGGER.addHandler(handler)
        _LOGGER.propagate = False
        try:
            yield
        finally:
            _LOGGER.removeHandler(handler)
            _LOGGER.propagate = propagate
