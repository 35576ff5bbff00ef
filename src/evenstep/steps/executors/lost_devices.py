"""The devices that are lost at work, and whether the others can go on without them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from evenstep.engine import Engine
from evenstep.engine.task import is_device_failure
from evenstep.errors import add_note, text_of
from evenstep.replicas import Replicas

logger = logging.getLogger("evenstep")


class LostDevices:
    """Gives up devices that fail or stand still, and says whether the others can go on.

    Args:
        engine: has the devices.
        replicas: the replicas of the model.
        after_s: how long a device may be at one shard while another one waits.
    """

    def __init__(self, engine: Engine, replicas: Replicas, after_s: float) -> None:
        self.after_s = after_s
        self._engine = engine
        self._replicas = replicas
        self._done_without: frozenset[int] = frozenset()

    @property
    def alive(self) -> set[int]:
        """The lanes of the devices that are not lost."""
        return set(range(len(self._engine.devices))) - self._engine.lost_lanes

    def give_up(self, lane: int) -> None:
        """Give a device up, unless that was done before."""
        if lane not in self._engine.lost_lanes:
            self._engine.lose(lane)

    def give_up_failed(self, errors: Mapping[int, BaseException]) -> None:
        """Give up the devices that failed.

        Args:
            errors: by lane, what went wrong there.
        """
        for lane, error in errors.items():
            if is_device_failure(error):
                self._engine.lose_failed(error, lane)

    def can_go_on(self, after: BaseException, when: str) -> bool:
        """Return whether devices were lost that can be done without; a warning names them.

        Args:
            after: the error that the loss has caused.
            when: what was being computed, such as "step 3".
        """
        goes_on = self._go_on(f"in {when} ({text_of(after)})")
        lost = ", ".join(
            str(self._engine.devices[lane]) for lane in sorted(self._engine.lost_lanes)
        )
        if lost and not goes_on:
            add_note(
                after,
                f"{lost} was lost, and training can't go on without it: load the last checkpoint, "
                f"on other devices",
            )
        return goes_on

    def go_on_without_idle(self, before: str) -> None:
        """Do without the devices whose threads ended when no work was theirs.

        Args:
            before: what is computed next, such as "step 3".
        """
        if self._engine.dead_lanes - self._done_without:
            self._go_on(f"before {before} (its thread ended)")

    def _go_on(self, when: str) -> bool:
        lost = self._engine.lost_lanes
        newly_lost = lost - self._done_without - self._engine.given_up
        if not newly_lost or not self._replicas.drop_lanes(lost):
            return False
        self._done_without = lost
        for lane in sorted(newly_lost):
            logger.warning(
                f"{self._engine.devices[lane]} was lost {when}: the other devices go on without "
                f"it, with the same result"
            )
        return True
