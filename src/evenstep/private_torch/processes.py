"""Several processes: the store where they met, and the network interface that gloo listens on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from evenstep.private_torch.names import private

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as Store

default_store: Callable[[], Store] = private(
    "torch.distributed.distributed_c10d",
    "_get_default_store",
    "meet where torch.distributed.init_process_group did",
    needed=False,
)

GlooOptions: Any = private(
    "torch.distributed.ProcessGroupGloo",
    "_Options",
    "choose gloo's network interface",
    needed=False,
)

BACKENDS: Any = private(
    "torch.distributed.Backend",
    "_plugins",
    "exchange gradients of accelerators that an extension brings, without the CPU",
    public_way={},
)
"""What makes a group of processes, by the backend's name in capitals: of extensions only."""
