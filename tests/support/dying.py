"""Exceptions that no code may touch, and lanes whose threads end."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    """Refuses every attribute, `__notes__` too."""

    code: int = 3


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedError(Exception):
    """Has no place for attributes."""

    code: int = 3


class SilentError(Exception):
    """Can't be printed."""

    def __str__(self):
        raise LookupError("no text")

    __repr__ = __str__


class NoNotesError(Exception):
    """Refuses notes, and a traceback by its method."""

    def add_note(self, note):
        raise LookupError("no notes")

    def with_traceback(self, traceback):
        raise LookupError("no traceback")

    @property
    def __notes__(self):
        raise LookupError("no notes")


class StrangeError(BaseException):
    """Neither an Exception nor one that Python knows."""


KINDS = [FrozenError, SlottedError, SilentError, NoNotesError, StrangeError, SystemExit]


def end_lane(engine, lane, kind=SystemExit):
    """Have the thread of a lane end with an exception of this kind when it next gets work."""
    put = engine.lanes.put

    def end(lane):
        raise kind

    engine.lanes.put = lambda to, work: put(to, end if to == lane else work)
