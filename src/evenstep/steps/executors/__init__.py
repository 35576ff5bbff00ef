"""Who computes which shard of a step: each device its own, all side by side, or all the same."""

from evenstep.steps.executors.independent import IndependentExecutor, explain
from evenstep.steps.executors.lockstep import LockstepExecutor, lockstep_option
from evenstep.steps.executors.sliced import SlicedExecutor

__all__ = [
    "IndependentExecutor",
    "LockstepExecutor",
    "SlicedExecutor",
    "explain",
    "lockstep_option",
]
