"""The copies of the user's model and optimizer that the devices compute with."""

from evenstep.replicas.optimizer_proxy import OptimizerTwin
from evenstep.replicas.replica import Replica, broadcast
from evenstep.replicas.replicas import Replicas, check_trainable, move_home

__all__ = [
    "OptimizerTwin",
    "Replica",
    "Replicas",
    "broadcast",
    "check_trainable",
    "move_home",
]
