"""Callbacks of a trainer: their interface, a log on disk, a progress bar, and curves."""

from evenstep.callbacks.callback import Callback, EpochRecord, EpochStart, SaveRecord, StepRecord
from evenstep.callbacks.curve import LiveCurve
from evenstep.callbacks.progress_bar import ProgressBar
from evenstep.callbacks.run_log import RunLog

__all__ = [
    "Callback",
    "EpochRecord",
    "EpochStart",
    "LiveCurve",
    "ProgressBar",
    "RunLog",
    "SaveRecord",
    "StepRecord",
]
