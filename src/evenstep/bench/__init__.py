"""evenstep beside others, and on more devices: measured in fresh processes, in rotating rounds."""

from evenstep.bench.lineup import Contender, scaling, side_by_side
from evenstep.bench.results import Record
from evenstep.bench.rounds import Summary, paired_ratios, rotated, summarise
from evenstep.bench.running import missing, run_rounds, steps_for
from evenstep.bench.tables import Scaled, against, scaled, speeds

__all__ = [
    "Contender",
    "Record",
    "Scaled",
    "Summary",
    "against",
    "missing",
    "paired_ratios",
    "rotated",
    "run_rounds",
    "scaled",
    "scaling",
    "side_by_side",
    "speeds",
    "steps_for",
    "summarise",
]
