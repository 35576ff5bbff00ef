"""Whether the processes can exchange gradients between their accelerators: tried when they open."""

from __future__ import annotations

import contextlib
import logging
import time

import torch

from evenstep.devices import Device, accelerator
from evenstep.distributed.accelerators.backend import BackendCollectives
from evenstep.distributed.process_group import Exchange, Peers
from evenstep.engine import streams
from evenstep.errors import PeerError

logger = logging.getLogger("evenstep")


def open_collectives(peers: Peers, device: Device, call: str) -> BackendCollectives | None:
    """Return the collectives of this process's accelerator, if all processes have the same ones.

    Otherwise it returns None in every process, and the first one logs why: then gradients travel
    through the CPU. Each process must call this function.

    Args:
        peers: the processes.
        device: where the sum of the gradients is needed.
        call: the trainer's method that opens the exchange.
    """
    own_kind = device.kind.encode()
    kinds = [*map(bytes.decode, peers.gather(own_kind, Exchange(call, "its first device")))]
    found: BackendCollectives | None = None
    reason = ""
    if len({*kinds}) > 1:
        reason = f"the processes' first devices are of different kinds ({', '.join(kinds)})"
    elif not device.is_accelerator:
        reason = "the processes' first devices are CPUs"
    elif peers.connect_accelerators is None:
        reason = "the job has a secret, which only gloo's connections are tested for"
    else:
        try:
            found = peers.connect_accelerators(device.torch_device)
            _try(found, peers.timeout_s)
        except (PeerError, RuntimeError, NotImplementedError, AttributeError) as error:
            reason = f"on rank {peers.rank}, {str(error).splitlines()[0]}"
    exchange = Exchange(call, "the trial of its accelerator's collectives")
    reasons = [*map(bytes.decode, peers.gather(reason.encode(), exchange))]
    if not any(reasons):
        return found
    if found is not None:
        found.close()
    if peers.rank == 0:
        why = next(filter(None, reasons))
        logger.warning("gradients travel between processes through the CPU and gloo: %s", why)
    return None


def _try(collectives: BackendCollectives, timeout_s: float) -> None:
    """Call both collectives with a few numbers; whether the bits are right is tested later.

    Raises:
        RuntimeError, NotImplementedError, AttributeError: the backend lacks one, or it failed.
        PeerError: they did not end within the time limit.
    """
    size, device = collectives.size, collectives.device
    with accelerator.queued_on(collectives.stream):
        given = torch.arange(size, dtype=torch.uint8, device=device)
        taken, gathered = torch.empty_like(given), torch.empty_like(given)
        ones = [1] * size
        collectives.all_to_all(taken, given, ones, ones).wait()
        collectives.all_gather(gathered.split(1), taken[:1]).wait()
        fence = accelerator.fence_here(device)
    late_s = time.perf_counter() + timeout_s
    if not streams.finish([fence], lambda: time.perf_counter() > late_s):
        with contextlib.suppress(RuntimeError):
            collectives.close()
        raise PeerError(f"{collectives.name} did not exchange {size} bytes within {timeout_s:g} s")
