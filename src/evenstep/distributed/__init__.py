"""The processes of a job: how they find each other, exchange messages, and sum gradients."""

from evenstep.distributed.consistency import (
    agree,
    differences,
    follow_the_first,
    listed,
    refuse_divergence,
    refuse_wrong_sums,
)
from evenstep.distributed.process_group import Exchange, Peers
from evenstep.distributed.rendezvous import (
    is_first,
    job_share,
    join,
    local_share,
    machine_count,
    restarts,
    show_reported_errors_in_one_line,
    was_launched,
)
from evenstep.distributed.secret import read_secret
from evenstep.distributed.shared.memory import shared_bytes
from evenstep.distributed.status_board import StatusBoard
from evenstep.distributed.watchdog import LauncherWatch

__all__ = [
    "Exchange",
    "LauncherWatch",
    "Peers",
    "StatusBoard",
    "agree",
    "differences",
    "follow_the_first",
    "is_first",
    "job_share",
    "join",
    "listed",
    "local_share",
    "machine_count",
    "read_secret",
    "refuse_divergence",
    "refuse_wrong_sums",
    "restarts",
    "shared_bytes",
    "show_reported_errors_in_one_line",
    "was_launched",
]
