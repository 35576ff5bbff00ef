"""Runs the experiments of Dive into Deep Learning's chapter on performance on evenstep."""

from evenstep.reproduce.experiments import experiments
from evenstep.reproduce.kept import Kept, run
from evenstep.reproduce.plan import Experiment, Part, Row, Workplace
from evenstep.reproduce.report import write_report

__all__ = [
    "Experiment",
    "Kept",
    "Part",
    "Row",
    "Workplace",
    "experiments",
    "run",
    "write_report",
]
