"""The exceptions that evenstep raises on purpose, as a tree.

    EvenstepError
    ├── InputError (also a ValueError)   an argument can't be used; nothing was changed
    │   ├── DeviceError                  a device does not exist, or its name is invalid
    │   ├── BatchError                   a batch can't be cut into shards
    │   ├── ModelError                   a model, loss or optimizer can't be trained
    │   │   └── ContractError            a shard reads or changes something that it must not
    │   ├── DataError                    a data file is missing, damaged or out of range
    │   ├── CheckpointError              a checkpoint is missing, damaged or doesn't fit
    │   └── ExportError                  a model can't be exported, or an exported file is damaged
    ├── WrongSumError                    gradients were added up wrongly: a fault, not an input
    ├── NonFiniteLossError               a shard's loss is NaN or infinite; no update was made
    ├── SaveError                        a file can't be written; the earlier ones are unchanged
    ├── DeviceLostError                  a device failed or stopped responding
    ├── VersionError                     this version of torch lacks what evenstep reads
    ├── PeerError                        another process failed, ended, or did not respond in time
    │   └── DivergedError                a process's training state differs from the others'
    ├── MXNetError (also a RuntimeError) a call of evenstep.mxnet failed, at once or when it ran
    │   └── DeferredInitializationError  a parameter's shape is not known yet
    ├── DeadlockError                    a task waits inside a lane, possibly forever
    └── ClosedError                      used before `with` opened it, or after `with` closed it

A message says what was got, what is needed, and how to fix it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import logging
import reprlib
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class EvenstepError(Exception):
    """The base class of all these exceptions."""


class InputError(EvenstepError, ValueError):
    """An argument can't be used; nothing was changed."""


class DeviceError(InputError):
    """A device does not exist, or its name is invalid."""


class BatchError(InputError):
    """A batch can't be cut into shards."""


class ModelError(InputError):
    """A model, loss or optimizer can't be trained."""


class ContractError(ModelError):
    """A shard's work depends on more than its contract allows, or changes more; no update was made.

    What a shard computes must be a function of the parameters, the buffers at the step's opening,
    the shard's examples, and the shard's random numbers.
    """


class DataError(InputError):
    """A data file is missing, damaged or out of range."""


class CheckpointError(InputError):
    """A checkpoint is missing, damaged or of a different experiment."""


class ExportError(InputError):
    """A model can't be exported, or an exported file is missing or damaged."""


class NonFiniteLossError(EvenstepError):
    """A shard's loss is NaN or infinite; no update was made."""


class SaveError(EvenstepError):
    """A file can't be written; the earlier ones are unchanged."""


class DeviceLostError(EvenstepError):
    """A device failed or stopped responding."""


class VersionError(EvenstepError):
    """This version of torch lacks what evenstep reads under a private name."""


class PeerError(EvenstepError):
    """Another process failed, ended, or did not respond in time.

    Attributes:
        rank: rank of that process; None if unknown.
        reported: whether that process reports the error itself.
    """

    def __init__(self, message: str, rank: int | None = None, *, reported: bool = False) -> None:
        super().__init__(message)
        self.rank = rank
        self.reported = reported


class DivergedError(PeerError):
    """A process's training state differs from that of the others."""


class MXNetError(EvenstepError, RuntimeError):
    """A call of `evenstep.mxnet` failed: at once, or when the queued operation ran."""


class DeferredInitializationError(MXNetError):
    """A parameter's shape is not known before the first forward pass."""


class WrongSumError(EvenstepError):
    """The sum of two shards' gradients is not what plain torch gives; no update was made.

    Or several processes got a sum of known numbers that differs from the sum in one place. This is
    a fault of evenstep or of torch. Opening a trainer and the first step look for it.
    """


class DeadlockError(EvenstepError):
    """A task waits inside a lane, possibly forever."""


class ClosedError(EvenstepError):
    """Used before `with` opened it, or after `with` closed it."""


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, once (PEP 678; Python 3.10 stores it but does not print it).

    An exception that refuses attributes, such as a frozen dataclass, stays as it is.
    """
    with contextlib.suppress(Exception):
        notes = getattr(error, "__notes__", [])
        if note not in notes:
            error.__notes__ = [*notes, note]  # type: ignore[attr-defined]


def text_of(error: BaseException, spell: Callable[[object], str] = str) -> str:
    """Return the text (or the `repr`) of an exception, also of one whose own method raises."""
    try:
        return spell(error)
    except Exception as other:
        return f"(its text can't be printed: {type(other).__name__})"


def shown(value: object) -> str:
    """Return a value for a message: its `repr` on one line, shortened where it is long."""
    return " ".join(_SHORT.repr(value).split())


def counted(number: int, thing: str) -> str:
    """Return a number with its noun, such as "1 step" or "2 processes"."""
    plural = thing + ("es" if thing.endswith("s") else "s")
    return f"{number} {thing if number == 1 else plural}"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlong = 40


def hides_own_frames(
    call: Callable[P, R], habits: Mapping[str, str] = types.MappingProxyType({})
) -> Callable[P, R]:
    """Call `hide_own_frames` for every error that leaves `call`.

    An error of Python's for arguments that `call` does not take gets a note with the name of the
    argument that was meant, also if that is a field of an argument that groups some (a dataclass).

    Args:
        call: a function that users call.
        habits: names of arguments that users of other libraries write, and what to do instead.
    """
    code = inspect.unwrap(call).__code__
    known = inspect.signature(call).parameters.keys()

    @functools.wraps(call)
    def outermost(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, TypeError) or was_entered(code, error):
                hide_own_frames(error)
            else:
                error.__traceback__ = None
                for name in kwargs.keys() - known:
                    places = _fields_of_groups(call)
                    places |= {argument: f"write {argument}=" for argument in known - kwargs.keys()}
                    places |= habits
                    for meant in difflib.get_close_matches(name, places, 1, 0.75):
                        add_note(error, f"got {name}=: {places[meant]}")
            raise

    return outermost


def _fields_of_groups(call: Callable[..., object]) -> dict[str, str]:
    """Return how to spell each field of the dataclasses that are arguments of a function."""
    function = inspect.unwrap(call)
    groups = {
        argument: function.__globals__.get(kind.removesuffix(" | None"))  # annotations are strings
        for argument, kind in function.__annotations__.items()
    }
    return {
        field.name: f"write {argument}={group.__name__}({field.name}=...)"
        for argument, group in groups.items()
        if isinstance(group, type) and dataclasses.is_dataclass(group)
        for field in dataclasses.fields(group)
    }


def was_entered(code: types.CodeType, error: BaseException) -> bool:
    """Whether an error was raised inside a function, and not by Python when it was called."""
    return any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__))


def hide_own_frames(error: Exception) -> None:
    """Leave evenstep's frames out of the traceback of an error that is about to reach the user.

    What remains are the lines of the user's program and of the libraries that it calls, also for
    the earlier errors that are shown with it. The frames stay where they say something: if evenstep
    itself fails, with an error that it does not raise on purpose, and while the logger "evenstep"
    has the level DEBUG.
    """
    if logging.getLogger("evenstep").isEnabledFor(logging.DEBUG) or _failed_itself(error):
        return
    shorter = _without_own(error)
    if sys.version_info < (3, 11):  # where a bare `raise` shows what was caught: one frame stays
        assert error.__traceback__ is not None
        error.__traceback__.tb_next = shorter
    BaseException.with_traceback(error, shorter)  # the class of the error may have its own method
    for earlier in _earlier(error):
        if error.__cause__ is earlier or not _failed_itself(earlier):
            BaseException.with_traceback(earlier, _without_own(earlier))


def _failed_itself(error: BaseException) -> bool:
    """Whether no line outside of evenstep raised an error, nor evenstep on purpose."""
    links = _links(error)
    return not links or (_is_own(links[-1]) and not isinstance(error, EvenstepError))


def _without_own(error: BaseException) -> types.TracebackType | None:
    """Return an error's traceback without the frames of evenstep."""
    shorter: types.TracebackType | None = None
    for one in reversed(_links(error)):
        if not _is_own(one):
            shorter = types.TracebackType(shorter, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return shorter


def _links(error: BaseException) -> list[types.TracebackType]:
    links, link = [], error.__traceback__
    while link is not None:
        links.append(link)
        link = link.tb_next
    return links


def _earlier(error: BaseException) -> list[BaseException]:
    """Return the errors that are shown above an error: causes, and those it came beside."""
    found, latest = [error], error
    while True:
        before = latest.__cause__
        if before is None and not latest.__suppress_context__:
            before = latest.__context__
        if before is None or any(before is one for one in found):
            return found[1:]
        found.append(before)
        latest = before


def _is_own(link: types.TracebackType) -> bool:
    name = link.tb_frame.f_globals.get("__name__", "")
    return isinstance(name, str) and name.partition(".")[0] == __name__.partition(".")[0]
