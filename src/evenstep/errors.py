"""Every error that evenstep raises on purpose, drawn as a tree.

    EvenstepError
    ├── InputError (also a ValueError)   what the caller gave can't be used; nothing was changed
    │   ├── DeviceError                  a device that isn't there, or a name that isn't one
    │   ├── BatchError                   a batch that can't be cut into shards
    │   ├── ModelError                   a model, loss or optimizer that can't be trained here
    │   ├── DataError                    a data file that is missing, damaged or out of range
    │   ├── CheckpointError              a checkpoint that is missing, damaged or of another run
    │   └── ExportError                  a model that can't be exported, or a bad exported file
    ├── NonFiniteLossError               a shard's loss is NaN or infinite; the step was not taken
    ├── SaveError                        a checkpoint can't be written; the earlier ones are whole
    ├── DeviceLostError                  a device failed or stopped, and what needed it can't go on
    ├── PeerError                    another process failed, is gone, or did not come in time
    │   └── DivergedError            a process is in another state than the others
    ├── DeadlockError                    a task waits inside a lane, where it could wait for ever
    └── ClosedError                      used before `with` opened it, or after `with` closed it

A message says what was got, what is needed, and what to do.
"""

from __future__ import annotations


class EvenstepError(Exception):
    """The root of the tree."""


class InputError(EvenstepError, ValueError):
    """What the caller gave can't be used; nothing was changed."""


class DeviceError(InputError):
    """A device that isn't there, or a name that isn't one."""


class BatchError(InputError):
    """A batch that can't be cut into shards."""


class ModelError(InputError):
    """A model, loss or optimizer that can't be trained here."""


class DataError(InputError):
    """A data file that is missing, damaged or out of range."""


class CheckpointError(InputError):
    """A checkpoint that is missing, damaged or of another run."""


class ExportError(InputError):
    """A model that can't be exported, or an exported file that is missing or damaged."""


class NonFiniteLossError(EvenstepError):
    """A shard's loss became NaN or infinite; the step was not taken."""


class SaveError(EvenstepError):
    """A checkpoint could not be written; the earlier ones are whole."""


class DeviceLostError(EvenstepError):
    """A device failed or stopped, and what needed it can't go on."""


class PeerError(EvenstepError):
    """Another process failed, is gone, or did not come in time.

    Attributes:
        rank: of that process; None if it isn't known.
        told: whether that process says itself what is wrong.
    """

    def __init__(self, message: str, rank: int | None = None, *, told: bool = False) -> None:
        super().__init__(message)
        self.rank = rank
        self.told = told


class DivergedError(PeerError):
    """A process is in another state than the others."""


class DeadlockError(EvenstepError):
    """A task waits inside a lane, where it could wait for ever."""


class ClosedError(EvenstepError):
    """Used before `with` opened it, or after `with` closed it."""


def add_note(error: BaseException, note: str) -> None:
    """Add a line to what Python prints of an error (PEP 678; before Python 3.11 it only keeps)."""
    notes = getattr(error, "__notes__", [])
    if note not in notes:
        error.__notes__ = [*notes, note]  # type: ignore[attr-defined]
