"""The answer, as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from evenstep.comparison.finding import HARMLESS, Finding
from evenstep.comparison.reading import Run


def lines_of(finding: Finding, ours: Run, theirs: Run) -> Iterator[str]:
    """Yield the answer: the verdict, the evidence, what follows, and what to do."""
    where = "" if finding.step is None else f", first in update {finding.step} (counted from 0)"
    yield f"{finding.cause.value}{where}"
    if _is_repeated(ours, theirs) and finding.cause not in HARMLESS:
        yield "  the two are records of one command: it can't be repeated as it is"
    for line in finding.evidence:
        yield f"  {line}"
    for line in finding.follows:
        yield f"  {line}"
    if finding.remedy:
        yield f"  what to do: {finding.remedy}"


def _is_repeated(ours: Run, theirs: Run) -> bool:
    mine, its = ours.processes, theirs.processes
    return len(mine) == len(its) and mine[0].command == its[0].command
