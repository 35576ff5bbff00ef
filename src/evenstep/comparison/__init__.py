"""Two recorded runs, compared: where they part first, and why."""

from evenstep.comparison.finding import Cause, Finding, lines_of
from evenstep.comparison.reading import Run, read_run
from evenstep.comparison.verdict import compare, find_cause

__all__ = ["Cause", "Finding", "Run", "compare", "find_cause", "lines_of", "read_run"]
