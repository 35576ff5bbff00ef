"""The processes of a job: found, linked, and heard."""

from evenstep.distributed.consistency import agree, refuse_divergence
from evenstep.distributed.process_group import Peers
from evenstep.distributed.rendezvous import (
    is_first,
    join,
    local_share,
    restarts,
    show_told_in_a_line,
    was_launched,
)
from evenstep.distributed.shared_memory import shared_bytes
from evenstep.distributed.status_board import Board
from evenstep.distributed.watchdog import LauncherWatch

__all__ = [
    "Board",
    "LauncherWatch",
    "Peers",
    "agree",
    "is_first",
    "join",
    "local_share",
    "refuse_divergence",
    "restarts",
    "shared_bytes",
    "show_told_in_a_line",
    "was_launched",
]
