"""Where the processes of one machine meet: a store on the loopback interface.

torch's own rendezvous listens on every interface and keeps its state pickled in its store, so that
whoever reaches it can run code in the launcher. On one machine neither is needed.
"""

from __future__ import annotations

import socket

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "evenstep-loopback"
_LOOPBACK = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """The meeting of one launcher with itself, as torch's elastic agent wants it."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        with socket.socket() as listener:
            listener.bind((_LOOPBACK, 0))
            listener.listen()
            self._port: int = listener.getsockname()[1]
            self._store: Store = TCPStore(
                _LOOPBACK,
                self._port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listener.detach(),
            )

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store, and that this launcher is the only one."""
        place = RendezvousStoreInfo(_LOOPBACK, self._port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, place)

    @property
    def use_agent_store(self) -> bool:
        """Whether the processes meet in this store too."""
        return True

    def get_backend(self) -> str:
        """Return the name that it is registered by."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return the job's name."""
        return self._run_id

    def num_nodes_waiting(self) -> int:
        """Return how many launchers want to come in: none can."""
        return 0

    def is_closed(self) -> bool:
        """Whether no further meeting is possible."""
        return False

    def set_closed(self) -> None:
        """Do nothing: nobody else is there to be told."""

    def shutdown(self) -> bool:
        """Say that nothing is left open; the store goes with the launcher."""
        return True


def register() -> None:
    """Let torch's launcher find it by its name."""
    if BACKEND not in rendezvous_handler_registry._registry:
        rendezvous_handler_registry.register(BACKEND, _make)


def _make(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)
