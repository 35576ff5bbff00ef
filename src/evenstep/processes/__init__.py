"""The processes of a job: found, linked, and heard."""

from evenstep.processes.agreement import agree
from evenstep.processes.board import Board
from evenstep.processes.divergence import refuse_divergence
from evenstep.processes.memory import shared_bytes
from evenstep.processes.parent import LauncherWatch
from evenstep.processes.peers import Peers
from evenstep.processes.uncaught import show_told_in_a_line
from evenstep.processes.world import is_first, join, local_share, restarts, was_launched

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
