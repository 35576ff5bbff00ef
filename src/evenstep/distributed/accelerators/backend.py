"""The collectives of an accelerator's backend in torch.distributed: NCCL, XCCL, an extension's."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from evenstep.collectives import Transfer
from evenstep.errors import PeerError
from evenstep.private_torch.processes import BACKENDS

if TYPE_CHECKING:
    from evenstep.private_torch.processes import Store


class BackendCollectives:
    """The collectives of a group of processes, for vectors on one accelerator of each.

    They move bytes, so the backend need not know the dtypes. The group has a communicator of its
    own, and everything is queued on one stream: what a user's code sends through other groups can't
    get in between.

    Args:
        group: the group, a process group of torch or one of its backends.
        name: the backend's name, such as "nccl".
        rank, size: this process's number, and the number of processes.
        device: this process's accelerator.

    Attributes:
        name, rank, size, device: as given.
        stream: where collectives, and what is added up between them, are queued.
    """

    def __init__(self, group: Any, name: str, rank: int, size: int, device: torch.device) -> None:
        self._group = group
        self.name, self.rank, self.size, self.device = name, rank, size, device
        self.stream = torch.Stream(device)

    def all_to_all(
        self, out: torch.Tensor, given: torch.Tensor, taken: Sequence[int], to_each: Sequence[int]
    ) -> Transfer:
        """Start to give every process its part of `given`; `out` gets the parts for this one."""
        nbytes = out.element_size()
        sizes = ([nbytes * count for count in counts] for counts in (taken, to_each))
        work: Transfer = self._group.alltoall_base(_bytes(out), _bytes(given), *sizes)
        return work

    def all_gather(self, outs: Sequence[torch.Tensor], given: torch.Tensor) -> Transfer:
        """Start to give `given` to all; `outs` gets those of all by rank, all of one length."""
        work: Transfer = self._group.allgather([[*map(_bytes, outs)]], [_bytes(given)])
        return work

    def close(self) -> None:
        """Leave the group; collectives that wait for others end, with any content."""
        for name in ("abort", "shutdown"):
            if hasattr(self._group, name):
                with contextlib.suppress(RuntimeError, NotImplementedError):
                    getattr(self._group, name)()
                return


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def connect_backend(
    kind: str, store: Store, rank: int, size: int, timeout_s: float
) -> tuple[Any, str]:
    """Return a new group of the backend that torch has for a type of device, and its name.

    Args:
        kind: the type of device, such as "cuda".
        store: where the processes find each other, with a prefix for this group alone.
        rank: this process's number.
        size: the number of processes.
        timeout_s: the maximum time that a collective may take, where the backend watches that.

    Raises:
        PeerError: there is none that could be made.
    """
    name = dist.Backend.default_device_backend_map.get(kind, "")
    make = _maker(name, datetime.timedelta(seconds=timeout_s))
    if make is None:
        raise PeerError(f"torch.distributed has no backend here for {kind} devices")
    try:
        return make(store, rank, size), name
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        raise PeerError(f"{name} can't connect ({str(error).splitlines()[0]})") from error


def _maker(name: str, timeout: datetime.timedelta) -> Callable[[Store, int, int], Any] | None:
    plugin = BACKENDS.get(name.upper())
    if plugin is not None:
        if plugin.extended_api:
            return None
        return lambda store, rank, size: plugin.creator_fn(store, rank, size, timeout)
    kind: Any = getattr(dist, f"ProcessGroup{name.upper()}", None)
    if not name or kind is None or name == "gloo":
        return None

    def make(store: Store, rank: int, size: int) -> Any:
        options = kind.Options()
        options._timeout = timeout
        return kind(store, rank, size, options)

    return make
