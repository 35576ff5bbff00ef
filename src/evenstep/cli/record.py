"""Facts about runs, frozen, with JSON in and out. Pages and pictures are made from these alone."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from evenstep.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRecord:
    """What a training run was, and what came of it.

    Attributes:
        model: its name, as given on the command line.
        data: the name of the data set.
        devices: names of the devices that computed the shards.
        shards: V, the shards of every minibatch.
        batch_size: examples of a minibatch (the last one of an epoch may be shorter).
        epochs: epochs begun since the start of the training, over all resumes; a run that stops
            in the middle of its third epoch has 3.
        steps: steps done since the start of the training, over all resumes.
        seed: of the weights, the order of the data and the random ops.
        train_loss: mean over the examples that this process trained on in its last epoch, each
            weighed the same; None if it trained on none (a resumed run that was at its end).
        test_accuracy: share of the test examples that are classified rightly, 0 to 1.
        seconds_per_epoch: for all training examples once, at the run's mean speed: steps and
            their data, without saving and testing; None if it trained on none.
        examples_per_second: the same speed; None if it trained on none.
        fingerprint: SHA-256 (hexadecimal) of parameters, buffers and optimizer state.
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

    def to_json(self) -> str:
        """Return one JSON object on one line, its keys in the order of the attributes."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> TrainRecord:
        """Read what `to_json` wrote.

        Raises:
            InputError: it isn't JSON, or not an object with exactly these keys and kinds of values.
        """
        values = _object(text)
        wanted = [field.name for field in dataclasses.fields(cls)]
        if values.keys() != set(wanted):
            raise InputError(
                f"got a record with the keys {', '.join(values) or '(none)'}: "
                f"exactly these are needed: {', '.join(wanted)}"
            )
        for name, kinds in _KINDS.items():
            if type(values[name]) not in kinds:
                names = " or ".join(kind.__name__ for kind in kinds)
                raise InputError(f"got {name} = {values[name]!r} in a record: {names} is needed")
        if not all(isinstance(device, str) for device in values["devices"]):
            raise InputError(f"got devices = {values['devices']!r} in a record: names are needed")
        return cls(**{**values, "devices": tuple(values["devices"])})


_NUMBER = (float, int)
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("model", "data", "fingerprint"), (str,)),
    **dict.fromkeys(("shards", "batch_size", "epochs", "steps", "seed"), (int,)),
    **dict.fromkeys(
        ("train_loss", "seconds_per_epoch", "examples_per_second"), (*_NUMBER, type(None))
    ),
    "devices": (list,),
    "test_accuracy": _NUMBER,
}


def _object(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InputError(f"got a record that is not JSON ({error}): is it another file?") from None
    if not isinstance(values, dict):
        raise InputError(f"got a {type(values).__name__} as a record: a JSON object is needed")
    return values
