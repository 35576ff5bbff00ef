"""Measures training speed: on more devices, and beside other libraries."""

from evenstep.bench.lineup import scaling, side_by_side, steps_for
from evenstep.bench.results import Record
from evenstep.bench.rounds import (
    Scaled,
    Summary,
    against,
    paired_ratios,
    rotated,
    scaled,
    speeds,
    summarise,
)
from evenstep.bench.running import Contender, installed, run_rounds

__all__ = [
    "Contender",
    "Record",
    "Scaled",
    "Summary",
    "against",
    "installed",
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
