"""Memory that all processes of one machine share, and the proof that they share it.

Names and inode numbers prove nothing: two containers on one host's network may each have a
`/dev/shm` of their own, with equal numbers. So the memory has no name. The first process hands it
to the others through a socket of the network namespace (unix(7), "abstract"): they and it prove to
each other that they are of the job. Every process writes a random token that all others must read.
The system frees the memory when the last process ends, even if it is killed.
"""

from __future__ import annotations

import array
import contextlib
import hmac
import mmap
import os
import secrets
import socket
from collections.abc import Iterator

import torch

from evenstep.distributed.process_group import Exchange, Peers
from evenstep.distributed.secret import TAG_BYTES, tag_of

_TOKEN_BYTES = 16
_WAIT_S = 2.0  # for data that another process has already sent
YES, NO = b"yes", b""


@contextlib.contextmanager
def listening() -> Iterator[tuple[str, socket.socket | None]]:
    """Listen on a random name, which every process of this network namespace can connect to.

    Yields the name and the socket; an empty name if the system has no such sockets.
    """
    name = f"evenstep-{secrets.token_hex(_TOKEN_BYTES)}"
    with contextlib.ExitStack() as opened:
        try:
            made = opened.enter_context(socket.socket(socket.AF_UNIX))
            made.bind(f"\0{name}")
            made.listen(socket.SOMAXCONN)
            made.settimeout(_WAIT_S)
        except (AttributeError, OSError):
            yield "", None
        else:
            yield name, made


@contextlib.contextmanager
def connected(name: str, greeting: bytes = b"") -> Iterator[socket.socket | None]:
    """Connect to the process that listens on `name`, and send `greeting`.

    Yields None if it is not in this network namespace.
    """
    with contextlib.ExitStack() as opened:
        try:
            if not name:
                raise ConnectionRefusedError
            made = opened.enter_context(socket.socket(socket.AF_UNIX))
            made.settimeout(_WAIT_S)
            made.connect(f"\0{name}")
            made.sendall(greeting)
        except (AttributeError, OSError):
            yield None
        else:
            yield made


def shared_bytes(peers: Peers, nbytes: int) -> torch.Tensor | None:
    """Return zeros, uint8 (nbytes,), in the same memory in every process; each must call this.

    If one process can't read what another one has written there, all return None.
    """
    found = shared_file(peers, nbytes)
    if found is None:
        return None
    memory, handle = found
    os.close(handle)
    return memory


def shared_file(peers: Peers, nbytes: int) -> tuple[torch.Tensor, int] | None:
    """Return the memory of `shared_bytes`, and a descriptor of its file, which has no name."""
    whole = nbytes + _TOKEN_BYTES * peers.size  # the tokens lie behind the bytes
    handle = _handed_out(peers, whole) if peers.rank == 0 else _handed_over(peers)
    memory = None if handle is None else _mapped(handle, whole)
    tokens = None if memory is None else memory[nbytes:].view(peers.size, _TOKEN_BYTES)
    if _are_shared(peers, tokens) and memory is not None and handle is not None:
        return memory[:nbytes], handle
    if handle is not None:
        os.close(handle)
    return None


def _handed_out(peers: Peers, nbytes: int) -> int | None:
    """In the first process, create a file and send it to all others; None if that fails."""
    handle = _made_file(nbytes)
    key = secrets.token_hex(_TOKEN_BYTES)  # other users can see the names of sockets
    with listening() as (name, offered):
        is_offered = handle is not None and offered is not None
        all_say(peers, f"{name} {key}".encode() if is_offered else NO, "offered")
        if all(all_say(peers, YES if is_offered else NO, "connected to")):
            assert handle is not None
            assert offered is not None
            sent = _send_to_each(offered, handle, key.encode(), {*range(1, peers.size)})
            if all(all_say(peers, YES if sent else NO, "handed over")):
                return handle
    if handle is not None:
        os.close(handle)
    return None


def _made_file(nbytes: int) -> int | None:
    """Return a file in memory without a name; None if the system has none, or too little memory."""
    try:
        handle = os.memfd_create("evenstep")
    except (AttributeError, OSError):
        return None
    try:
        os.posix_fallocate(handle, 0, nbytes)
    except OSError:
        os.close(handle)
        return None
    return handle


def _handed_over(peers: Peers) -> int | None:
    """In the other processes, receive the file that `_handed_out` sends; None if that fails."""
    name, _, key = all_say(peers, NO, "offered")[0].decode().partition(" ")
    with connected(name, tag_of(key.encode(), "ask", peers.rank)) as link:
        if not all(all_say(peers, NO if link is None else YES, "connected to")):
            return None
        assert link is not None
        if not all(all_say(peers, YES, "handed over")):
            return None
        try:
            answer, handles, _, _ = socket.recv_fds(link, TAG_BYTES, 1)
        except OSError:
            return None
        if hmac.compare_digest(answer, tag_of(key.encode(), "give", peers.rank)) and handles:
            return handles[0]
        for handle in handles:
            os.close(handle)
        return None


def _send_to_each(offered: socket.socket, handle: int, key: bytes, missing: set[int]) -> bool:
    """Send a file to each process of the job, once; all have connected and asked for it.

    So whoever has not asked is a stranger, and is not waited for.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [handle]))]
    asked = {tag_of(key, "ask", rank): rank for rank in missing}
    try:
        while asked:
            link, _ = offered.accept()
            with link, contextlib.suppress(BlockingIOError, ConnectionError):
                link.setblocking(False)
                rank = asked.pop(link.recv(TAG_BYTES + 1), None)
                if rank is not None:
                    link.sendmsg([tag_of(key, "give", rank)], rights)
    except OSError:
        return False
    return True


def _mapped(handle: int, nbytes: int) -> torch.Tensor | None:
    """Map a file; None if that fails."""
    try:
        return torch.frombuffer(mmap.mmap(handle, nbytes), dtype=torch.uint8)
    except (OSError, ValueError):
        return None


def _are_shared(peers: Peers, tokens: torch.Tensor | None) -> bool:
    """Prove that all processes have the same memory: each writes a token that each other reads.

    Tokens are written to `tokens`, uint8 (processes, 16); None without memory. Each process must
    call this.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    if tokens is not None:
        tokens[peers.rank] = torch.frombuffer(bytearray(token), dtype=torch.uint8)
    written = all_say(peers, NO if tokens is None else token, "written")
    read = tokens is not None and [one.numpy().tobytes() for one in tokens] == written
    return all(all_say(peers, YES if read else NO, "read"))


def all_say(peers: Peers, message: bytes, what: str) -> list[bytes]:
    """Return what every process says to a question, by rank; each must call this."""
    return peers.gather(message, Exchange("step", f"shared memory to be {what}"))
