"""Copies of the user's model for the devices, and a proxy of the optimizer for steps in flight."""

from evenstep.replicas.buffer_rules import JUDGE
from evenstep.replicas.checks import (
    Members,
    check_followed,
    check_trainable,
    refuse_strangers,
    written_error,
)
from evenstep.replicas.computed_before import StandIn
from evenstep.replicas.copying import align_state, move_home, original_of
from evenstep.replicas.layouts import with_safe_format
from evenstep.replicas.optimizer_proxy import (
    OptimizerProxy,
    complete,
    hookable,
    inner_optimizers,
)
from evenstep.replicas.replica import (
    Replica,
    is_left,
    note_left,
    own_gradients,
    refuse_gradients_in_flight,
)
from evenstep.replicas.replicas import Replicas
from evenstep.replicas.settings import (
    is_plain_value,
    layer_settings,
    optimizer_settings,
    plain_attributes,
    python_number,
)

__all__ = [
    "JUDGE",
    "Members",
    "OptimizerProxy",
    "Replica",
    "Replicas",
    "StandIn",
    "align_state",
    "check_followed",
    "check_trainable",
    "complete",
    "hookable",
    "inner_optimizers",
    "is_left",
    "is_plain_value",
    "layer_settings",
    "move_home",
    "note_left",
    "optimizer_settings",
    "original_of",
    "own_gradients",
    "plain_attributes",
    "python_number",
    "refuse_gradients_in_flight",
    "refuse_strangers",
    "with_safe_format",
    "written_error",
]
