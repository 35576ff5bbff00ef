"""Notes for the user about the devices of a trainer, and about how exact its results are."""

from __future__ import annotations

from collections.abc import Sequence

from evenstep.devices import Device, layout_notes, rounding_notes
from evenstep.devices.discovery import WITHIN_ROUNDING
from evenstep.experiment import Experiment


class Notes:
    """The notes of a trainer.

    Attributes:
        lines: a line for each.
        within_rounding: whether results are equal to those of other devices within rounding, not
            bit for bit.
    """

    def __init__(self, devices: Sequence[Device], experiment: Experiment) -> None:
        self.lines = layout_notes(devices, experiment.shards)
        self.within_rounding = bool(rounding_notes(devices))
        if experiment.shards > 1 and not experiment.separable:
            self.lines.append(
                f"separable=False: the result depends on the number of shards, {experiment.shards}"
            )

    def note_rounding(self, reason: str) -> str:
        """Note that results are equal within rounding only; return the line."""
        self.within_rounding = True
        note = f"{reason}: {WITHIN_ROUNDING}"
        if note not in self.lines:
            self.lines.append(note)
        return note
