"""The one list of what a training's bits depend on, and what a difference in it means.

Processes compare it when they meet, a checkpoint keeps it, and a resume and `verify` compare it
again. Facts have names, and are sorted by kind: `{"layers": {"layer 1": "ReLU()"}}`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from evenstep.errors import CheckpointError

Facts: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Values that JSON can hold, by name, by kind."""

Verdict: TypeAlias = Literal["refused", "rounds", "said", "free"]
"""What follows from a difference.

    refused  an error: a different training
    rounds   results are equal within rounding: said once, and kept in `within_rounding`
    said     a line in the log
    free     nothing
"""

_NAMED = 3  # differences in one message


class Kind(NamedTuple):
    """What a difference in the facts of one kind means.

    Attributes:
        between: between processes that train together.
        resumed: between a checkpoint and the training that resumes from it.
        fix: what to do about a resume that is refused, or said.
        absent: what is said of a fact that one of the two does not have; None if such a fact is
            no difference: a different version may know other ones.
    """

    between: Verdict
    resumed: Verdict
    fix: str = ""
    absent: str | None = "none"


_MODEL = "build the model that was trained, or train from the start in a new folder"

KINDS = {
    "experiment": Kind(
        "refused",
        "refused",
        "that is part of the experiment; resume with the checkpoint's (devices may differ)",
    ),
    "tensors": Kind("refused", "refused", f"the checkpoint is of a different model: {_MODEL}"),
    "strides": Kind("refused", "rounds", absent="contiguous"),  # kernels round by them
    "extra": Kind("refused", "refused", f"the checkpoint is of a different model: {_MODEL}"),
    "slices": Kind(
        "refused",
        "refused",
        "slices are part of the experiment; call evenstep.nn.slice_ as before",
        "no slices",
    ),
    "frozen": Kind(
        "refused",
        "refused",
        "call requires_grad_ of the model's parameters as before, and change it after Trainer.load",
        "True",
    ),
    "layers": Kind(
        "refused",
        "refused",
        f"the checkpoint is of a different model: {_MODEL}; change settings of layers after "
        f"Trainer.load",
    ),
    "loss": Kind(
        "refused",
        "refused",
        "give the loss that was trained with, and change it after Trainer.load",
    ),
    "optimizer": Kind(
        "refused",
        "refused",
        "the checkpoint is of a different optimizer: give the one that was trained with, with its "
        "settings, which are restored anyway; change optimizer.param_groups after Trainer.load",
        None,
    ),
    "groups": Kind(
        "refused",
        "refused",
        "give the optimizer its parameters in the order and the groups in which they were trained",
        None,
    ),
    "scheduler": Kind(
        "refused",
        "refused",
        "the checkpoint is of a different scheduler: give the one that was trained with; its "
        "settings are restored",
    ),
    "data": Kind(
        "refused",
        "refused",
        "give the loader and the data set that training started with, at least until the epoch "
        "ends",
        None,
    ),
    "arithmetic": Kind("rounds", "rounds", absent=None),
    "instructions": Kind("free", "free"),  # named where `arithmetic` differs
    "strings": Kind(
        "free",
        "said",
        "code that iterates over a set of strings may now compute something else; start Python "
        "with the same PYTHONHASHSEED (0 from the beginning) to resume exactly",
    ),
    "settings of the optimizer": Kind("refused", "free"),  # a resume restores them
    "options": Kind("refused", "free"),
    "place": Kind("refused", "free"),
    "values": Kind("refused", "free"),
}
"""Every kind of facts, in the order in which differences are named."""


class Difference(NamedTuple):
    """A fact that differs; a value is None where the fact is not there.

    `str` names it, and both values.
    """

    kind: str
    name: str
    then: Any
    now: Any

    def __str__(self) -> str:
        absent = KINDS[self.kind].absent
        then, now = (absent if one is None else one for one in (self.then, self.now))
        return f"{self.name} {now} instead of {then}"


def differences(then: Facts, now: Facts) -> Iterator[Difference]:
    """Yield what differs between two lists of facts. A kind that one of them lacks is skipped."""
    for kind, (_, _, _, absent) in KINDS.items():
        if kind not in then or kind not in now:
            continue
        before, after = then[kind], now[kind]
        for name in {**after, **before}:
            is_known = absent is not None or (name in before and name in after)
            if is_known and before.get(name) != after.get(name):
                yield Difference(kind, name, before.get(name), after.get(name))


def refuse_to_resume(then: Facts, now: Facts, kinds: Collection[str] = KINDS) -> None:
    """Refuse a training that differs from the checkpoint's.

    Raises:
        CheckpointError: names what differs, and how to resume.
    """
    for kind, ones in itertools.groupby(differences(then, now), operator.attrgetter("kind")):
        if kind in kinds and KINDS[kind].resumed == "refused":
            raise CheckpointError(f"can't resume with {listed([*ones])}: {KINDS[kind].fix}")


def listed(different: Collection[Difference]) -> str:
    """Return the first differences in words, and the number of the others."""
    some = [*map(str, different)]
    more = len(some) - _NAMED
    return ", ".join(some[:_NAMED]) + (f" and {more} more" if more > 0 else "")
