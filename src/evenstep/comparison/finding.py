"""What a comparison says: a cause, in which step, by which evidence, and what to do."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator

from evenstep.comparison.reading import Run


class Cause(enum.Enum):
    """Why two runs differ. The value is the first sentence of the answer."""

    WEIGHTS = "they begin with different weights"
    SAME_ROWS = "several processes train on the same examples"
    MORE_ROWS = "an update is made from a different number of examples"
    CALLS = "the model is called more often on the same examples"
    ARGUMENTS = "the model is called with different arguments"
    ORDER = "the examples of one data set come in a different order"
    SAME_ORDER = "one of them sees the same order in every epoch"
    PADDED = "some examples are used twice at the end of an epoch"
    DROPPED = "one of them drops the last batch of an epoch"
    DATA = "they see different examples"
    CHANGED = "weights are changed outside of the optimizer"
    MODES = "a module is in a different mode"
    PRECISION = "they compute in a different precision"
    BATCH_NORM = "batch normalisation sees a part of the batch only"
    LAYER = "a module has different settings"
    DRAWS = "random numbers are drawn in the model of one of them only"
    DROPOUT = "different random numbers are drawn in the model"
    KERNEL = "a module gives different outputs for the same inputs"
    MEAN = "one of them takes a mean of means"
    LOSS = "the same outputs give a different loss"
    PARAMETERS = "different parameters are trained"
    NOT_EXCHANGED = "the processes don't exchange their gradients"
    SCALE = "their gradients have a different scale"
    GRADIENTS = "the same losses give different gradients"
    CLIPPED = "gradients are changed between the backward pass and the update in one of them"
    SKIPPED = "one of them leaves an update out"
    TURNS = "their optimizers take turns in a different order"
    SETTINGS = "their optimizers have different settings"
    UPDATE = "the optimizer makes a different update from the same gradients"
    BUFFERS = "their buffers differ after an update"
    LENGTH = "one of them makes more updates"
    SUM = "the gradients are summed in a different order: they differ by rounding only"
    ROUNDING = "a module rounds differently"
    NOTHING = "they are equal to the bit"


HARMLESS = (Cause.SUM, Cause.ROUNDING, Cause.NOTHING)
"""What is no mistake of anybody's."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The answer to the question why two runs differ.

    Attributes:
        cause: the first place where they part.
        step: the number of the update, counted from 0; None for before the first one.
        evidence: lines that say what was seen.
        remedy: what to do about it; "" for nothing.
        follows: lines that say what else differs, perhaps because of it.
        place: the module or parameter where they part; "" where it is none.
    """

    cause: Cause
    step: int | None
    evidence: tuple[str, ...]
    remedy: str = ""
    follows: tuple[str, ...] = ()
    place: str = ""


def because(
    cause: Cause, step: int | None, *evidence: str, remedy: str = "", place: str = ""
) -> Finding:
    """Return a finding whose evidence is these lines."""
    return Finding(cause, step, evidence, remedy, place=place)


def lines_of(finding: Finding, ours: Run, theirs: Run) -> Iterator[str]:
    """Yield the answer: the verdict, the evidence, what follows, and what to do."""
    has_step = finding.step is not None and finding.cause is not Cause.LENGTH
    where = f", first in update {finding.step} (counted from 0)" if has_step else ""
    yield f"{finding.cause.value}{where}"
    if _is_repeated(ours, theirs) and finding.cause not in HARMLESS:
        yield (
            "  the two are records of one command: unless a file or a variable has changed, it "
            "can't be repeated as it is"
        )
    for line in finding.evidence:
        yield f"  {line}"
    for line in finding.follows:
        yield f"  {line}"
    if finding.remedy:
        yield f"  what to do: {finding.remedy}"


def _is_repeated(ours: Run, theirs: Run) -> bool:
    mine, its = ours.processes, theirs.processes
    one, other = (
        (len(found), found[0].launched, found[0].command, found[0].facts) for found in (mine, its)
    )
    return one == other
