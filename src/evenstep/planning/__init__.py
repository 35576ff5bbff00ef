"""What more devices would bring, predicted from a step on one: a simulation without torch."""

from evenstep.planning.described import Arrangement, Link, Machine, Work
from evenstep.planning.plan import Plan, parse_network, plan
from evenstep.planning.prediction import Prediction, predict
from evenstep.planning.runs import Comparison, MeasuredRun, compared, measured_run
from evenstep.planning.simulation import StepTimes, simulate
from evenstep.planning.traced import facts_of, work_of_trace

__all__ = [
    "Arrangement",
    "Comparison",
    "Link",
    "Machine",
    "MeasuredRun",
    "Plan",
    "Prediction",
    "StepTimes",
    "Work",
    "compared",
    "facts_of",
    "measured_run",
    "parse_network",
    "plan",
    "predict",
    "simulate",
    "work_of_trace",
]
