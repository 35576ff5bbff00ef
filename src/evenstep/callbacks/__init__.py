"""Callbacks of a trainer: their interface, a log on disk, and views in notebooks."""

from evenstep.callbacks.callback import Callback, EpochRecord, SaveRecord, StepRecord
from evenstep.callbacks.run_log import RunLog
from evenstep.callbacks.views import LiveCurve, ProgressBar

__all__ = [
    "Callback",
    "EpochRecord",
    "LiveCurve",
    "ProgressBar",
    "RunLog",
    "SaveRecord",
    "StepRecord",
]
