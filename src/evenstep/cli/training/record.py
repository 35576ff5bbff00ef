"""The results of a training, as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRecord:
    """A training and its results.

    Attributes:
        model: name of the model, as given on the command line.
        data: name of the data set.
        devices: names of the devices that computed the shards.
        shards: V, the number of shards in each batch.
        batch_size: examples in a batch (an epoch's last batch may be shorter).
        epochs: epochs begun since the start of the training, over all resumes. A training that
            stops in the middle of its third epoch has 3.
        steps: steps done since the start of the training, over all resumes.
        seed: seed of the weights, the order of the data and the random operations.
        train_loss: mean loss over the examples that this process trained on in its last epoch;
            None if it trained on none (a training that was finished when it was resumed).
        test_accuracy: fraction of the test examples that are classified correctly.
        seconds_per_epoch: time for all training examples at the mean speed of this process. It
            includes loading, but not saving and testing. None if it trained on none.
        examples_per_second: the same speed; None if this process trained on no example.
        fingerprint: SHA-256 (hexadecimal) of parameters, buffers and optimizer state.
        fingerprint_2: its version 2, which covers the optimizer's settings and the extra state of
            modules too; empty in records of version 0.1.0.
        within_rounding: whether the result is equal to that of other devices within rounding, not
            bit for bit.
        facts: what the bits depend on besides the data, values by name, by kind, as
            `Trainer.facts` has them; empty in records of older versions.
        processes: number of processes that trained together; `devices` are those of the first one.
        machines: number of machines that they were on.
    """

    model: str
    data: str
    devices: tuple[str, ...]
    shards: int
    batch_size: int
    epochs: int
    steps: int
    seed: int
    train_loss: float | None
    test_accuracy: float
    seconds_per_epoch: float | None
    examples_per_second: float | None
    fingerprint: str
    fingerprint_2: str = ""
    within_rounding: bool = False
    facts: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    processes: int = 1
    machines: int = 1

    def to_json(self) -> str:
        """Return a JSON object on one line, with the attributes as keys in their order."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> TrainRecord:
        """Return the record that `to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "devices": tuple(values["devices"])})
