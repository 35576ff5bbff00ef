"""Counts the steps and examples of a training, and measures its speed."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """Where a training starts and ends.

    Attributes:
        first_step: steps done before this process began.
        steps: the step at which training ends.
        epoch_steps: steps in an epoch.
        epoch_examples: examples in an epoch.
        devices: names of the devices.
    """

    first_step: int
    steps: int
    epoch_steps: int
    epoch_examples: int
    devices: tuple[str, ...]

    @property
    def epochs(self) -> int:
        """The number of epochs, the last one possibly unfinished."""
        return -(-self.steps // self.epoch_steps)


class Progress:
    """The progress of a training; `add` is called after every step.

    Attributes:
        goal: where the training starts and ends.
        step: steps done since the start of the training.
        train_s: seconds that this process spent on steps and on loading their data.
        examples: examples that this process trained on.
        busy: for each device, the fraction of `train_s` in which it had work.
        test_accuracy: that after the last step, if it was measured; None otherwise.
    """

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self.step = goal.first_step
        self.train_s = 0.0
        self.examples = 0
        self.busy = [0.0] * len(goal.devices)
        self.test_accuracy: float | None = None
        self._epoch_loss = 0.0
        self._epoch_examples = 0

    def add(self, *, loss: float, examples: int, took_s: float, busy_s: list[float]) -> None:
        """Add one step.

        Args:
            loss: mean loss of the batch.
            examples: examples in the batch.
            took_s: seconds since the previous step ended, or was saved.
            busy_s: for each device, seconds of work since the trainer was opened.
        """
        if self.step % self.goal.epoch_steps == 0:
            self._epoch_loss, self._epoch_examples = 0.0, 0
        self.step += 1
        self.test_accuracy = None
        self.train_s += took_s
        self.examples += examples
        self.busy = [min(1.0, seconds / self.train_s) for seconds in busy_s]
        self._epoch_loss += loss * examples
        self._epoch_examples += examples

    @property
    def epoch(self) -> int:
        """The epoch of the last step, counted from 1; 0 before the first step."""
        return -(-self.step // self.goal.epoch_steps)

    @property
    def ends_epoch(self) -> bool:
        """Whether the last step ended its epoch."""
        return self.step % self.goal.epoch_steps == 0

    @property
    def loss(self) -> float | None:
        """Mean loss over the examples of this epoch so far, in this process; None before any."""
        return self._epoch_loss / self._epoch_examples if self._epoch_examples else None

    @property
    def examples_per_s(self) -> float | None:
        """Mean speed; None before the first step."""
        return self.examples / self.train_s if self.examples else None

    @property
    def epoch_s(self) -> float | None:
        """Seconds for an epoch at the mean speed; None before the first step."""
        speed = self.examples_per_s
        return self.goal.epoch_examples / speed if speed else None

    @property
    def left_s(self) -> float:
        """Remaining seconds, estimated from the mean time of a step."""
        done = self.step - self.goal.first_step
        return self.train_s / done * max(0, self.goal.steps - self.step) if done else 0.0
