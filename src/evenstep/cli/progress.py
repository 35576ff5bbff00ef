"""How far a training run is, and how fast: numbers only."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """Where a run starts and ends.

    Attributes:
        first_step: steps done before this process began.
        steps: the step at which the run is done.
        epoch_steps: steps of an epoch.
        epoch_examples: examples of an epoch.
        devices: names of the devices.
    """

    first_step: int
    steps: int
    epoch_steps: int
    epoch_examples: int
    devices: tuple[str, ...]

    @property
    def epochs(self) -> int:
        """How many epochs the run begins."""
        return -(-self.steps // self.epoch_steps)


class Progress:
    """What a run has done so far; `add` is called after every step.

    Attributes:
        goal: where it starts and ends.
        step: steps done since the start of the training.
        train_s: seconds spent in this process on steps and their data.
        examples: examples trained on in those seconds.
        busy: for each device the share of those seconds in which it had work, 0 to 1.
    """

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self.step = goal.first_step
        self.train_s = 0.0
        self.examples = 0
        self.busy = [0.0] * len(goal.devices)
        self._epoch_loss = 0.0
        self._epoch_examples = 0

    def add(self, *, loss: float, examples: int, took_s: float, busy_s: list[float]) -> None:
        """Count one step.

        Args:
            loss: mean over the batch.
            examples: of the batch.
            took_s: seconds since the step before ended (or was saved).
            busy_s: for each device, seconds of work since the trainer was opened.
        """
        if self.step % self.goal.epoch_steps == 0:
            self._epoch_loss, self._epoch_examples = 0.0, 0
        self.step += 1
        self.train_s += took_s
        self.examples += examples
        self.busy = [min(1.0, seconds / self.train_s) for seconds in busy_s]
        self._epoch_loss += loss * examples
        self._epoch_examples += examples

    @property
    def epoch(self) -> int:
        """The number of the epoch that the last step belongs to, from 1; 0 before the first."""
        return -(-self.step // self.goal.epoch_steps)

    @property
    def ends_epoch(self) -> bool:
        """Whether the last step was the last one of its epoch."""
        return self.step % self.goal.epoch_steps == 0

    @property
    def loss(self) -> float | None:
        """Mean over the examples trained on in this epoch by this process; None if none."""
        return self._epoch_loss / self._epoch_examples if self._epoch_examples else None

    @property
    def examples_per_s(self) -> float | None:
        """The mean speed; None before the first step."""
        return self.examples / self.train_s if self.examples else None

    @property
    def epoch_s(self) -> float | None:
        """Seconds for all examples of an epoch at the mean speed; None before the first step."""
        speed = self.examples_per_s
        return self.goal.epoch_examples / speed if speed else None

    @property
    def left_s(self) -> float:
        """Seconds left at the mean pace of the steps so far."""
        done = self.step - self.goal.first_step
        return self.train_s / done * max(0, self.goal.steps - self.step) if done else 0.0
