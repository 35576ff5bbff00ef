"""Memory that all processes of one machine share."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from evenstep.distributed.process_group import Exchange, Peers

FOLDER = Path("/dev") / "shm"  # a file system in memory, on Linux


def shared_bytes(peers: Peers, nbytes: int) -> torch.Tensor | None:
    """Return zeros, uint8 (nbytes,), in the same memory in every process; each must call this.

    None if the system has no shared memory, or too little. The file behind the memory is unlinked
    as soon as all processes have mapped it, so the system frees it when the last process ends.
    """
    path = _make_file(nbytes) if peers.rank == 0 else None
    try:
        named = Exchange("step", "shared memory")
        name = peers.gather(str(path or "").encode(), named)[0].decode()
        if not name:
            return None
        memory = torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)
        peers.gather(b"", Exchange("step", "shared memory to be mapped"))
        return memory
    finally:
        if path is not None:
            path.unlink()


def _make_file(nbytes: int) -> Path | None:
    if not FOLDER.is_dir():
        return None
    handle, name = tempfile.mkstemp(prefix="evenstep-", dir=FOLDER)
    try:
        os.posix_fallocate(handle, 0, nbytes)
    except OSError:
        Path(name).unlink()
        return None
    finally:
        os.close(handle)
    return Path(name)
