"""A PyTorch run of anybody's, written down step by step, without a change to its script."""

from evenstep.recording.recorder import LEVELS, Recorder, record

__all__ = ["LEVELS", "Recorder", "record"]
