"""A rendezvous for the processes of one machine: a store that listens on the loopback interface.

torch's own rendezvous listens on every interface and keeps pickled state in its store, so anyone
who can reach it can run code in the launcher. One machine needs neither.
"""

from __future__ import annotations

import socket

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "evenstep-loopback"
_LOOPBACK = "127.0.0.1"


class _LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of a single launcher, as torch's elastic agent calls it."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: Store | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Make a store for the processes that are about to be started, or started again.

        What processes before them have written is gone, also what only some of them have written.
        """
        with socket.socket() as listener:
            listener.bind((_LOOPBACK, 0))
            listener.listen()
            port: int = listener.getsockname()[1]
            self._store = TCPStore(
                _LOOPBACK,
                port,
                is_master=True,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listener.detach(),
                # torch 2.6's takes no socket; the other one waits for the rest of half a message.
                use_libuv=torch.__version__ >= "2.7",
            )
        place = RendezvousStoreInfo(_LOOPBACK, port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, place)

    @property
    def use_agent_store(self) -> bool:
        return True  # the worker processes use this store too

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def num_nodes_waiting(self) -> int:
        return 0  # no other launcher can join

    def is_closed(self) -> bool:
        return False  # the processes can be restarted

    def set_closed(self) -> None:
        """Do nothing: there is no other launcher to inform."""

    def shutdown(self) -> bool:
        return True  # the store is closed with the launcher


def register() -> None:
    """Register the rendezvous with torch's launcher."""
    rendezvous_handler_registry.register(BACKEND, _make)


def _make(parameters: RendezvousParameters) -> RendezvousHandler:
    return _LoopbackRendezvous(parameters.run_id)
