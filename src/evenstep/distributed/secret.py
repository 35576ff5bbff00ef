"""Who may join a job: processes prove that they know its secret, and tag what they say.

Each publishes a nonce. The secret and all nonces give the key of this meeting, and whoever makes a
tag with it (HMAC-SHA256) knows the secret and has just read the nonce of the one who checks. So a
value of another meeting, process or place is refused. A job without a secret has an empty one.
"""

from __future__ import annotations

import datetime
import hmac
import os
import secrets
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from evenstep.collectives import Transport, wait_all
from evenstep.errors import InputError, PeerError
from evenstep.files import read_file

if TYPE_CHECKING:
    from evenstep.private_torch.processes import Store

SECRET_FILE = "EVENSTEP_SECRET_FILE"  # noqa: S105 - a name
"""The environment variable that names the file with the job's secret."""

OPENS = "every process must open the trainer"

TAG_BYTES = 32
_NONCE_BYTES = 16
_LEAST_BYTES, _MOST_BYTES = 16, 4096  # of a secret: whoever sees a tag could guess a short one
_FIRST_HELLO = "evenstep/hello"
_FIX = (
    f"Give every process of the job the same file (--secret-file FILE, or {SECRET_FILE}), or none"
)


def read_secret(file: str | os.PathLike[str]) -> bytes:
    """Return the secret in a file, without the blanks around it.

    Raises:
        InputError: the file can't be read, or what it holds is too short or too long.
    """
    make = "make one by `openssl rand -hex 32`"
    try:
        secret = read_file(file, at_most=_MOST_BYTES).strip()
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"the secret in {file} can't be read ({reason}): {make}") from error
    if len(secret) < _LEAST_BYTES:
        raise InputError(
            f"the secret in {file} has {len(secret)} bytes, and needs at least {_LEAST_BYTES} that "
            f"nobody can guess: {make}"
        )
    return secret


def tag_of(key: bytes, *words: object) -> bytes:
    """Return the tag of some words, uint8 (32,), which only those who know the key can make."""
    texts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return hmac.digest(
        key, b"".join(len(one).to_bytes(8, "little") + one for one in texts), "sha256"
    )


def refuse_other_job(job: Store, secret: bytes) -> None:
    """Refuse a job whose first process doesn't know this one's secret, if that one has come.

    Who comes to a job that already runs has nobody to wait for, and is told at once.

    Raises:
        PeerError: it doesn't.
    """
    if job.check([_FIRST_HELLO]):
        _refuse_stranger(job.get(_FIRST_HELLO), secret)


def meeting_key(
    job: Store, own: Store, secret: bytes, rank: int, size: int, timeout_s: float
) -> bytes:
    """Return the key of processes that meet in a store, and know the same secret.

    Args:
        job: the store of the whole job.
        own: the part of it that is for this meeting alone.
        secret: the job's secret.
        rank: this process's number.
        size: the number of processes.
        timeout_s: the longest wait for another process.

    Raises:
        PeerError: a process doesn't respond, or doesn't know the secret.
    """
    text = f"{rank} {socket.gethostname()} {secrets.token_hex(_NONCE_BYTES)}"
    hello = f"{text} {tag_of(secret, 'hello', text).hex()}"
    own.set(f"hello/{rank}", hello)
    _refuse_stranger(job.compare_set(_FIRST_HELLO, "", hello), secret)
    names = [f"hello/{peer}" for peer in range(size)]
    hellos = awaited(own, names, datetime.timedelta(seconds=timeout_s))
    for one in hellos:
        _refuse_stranger(one, secret)
    return tag_of(secret, "key", size, *hellos)


def _refuse_stranger(hello: bytes, secret: bytes) -> None:
    text, _, tag = hello.rpartition(b" ")

    def is_made_with(known: bytes) -> bool:
        return hmac.compare_digest(tag, tag_of(known, "hello", text).hex().encode())

    if is_made_with(secret):
        return
    said = "".join(sign if sign.isprintable() else "?" for sign in text[:80].decode("latin-1"))
    rank, host, *_ = [*said.split(" "), "", ""]
    if not secret:
        has = "has a secret, and this process has none"
    elif is_made_with(b""):
        has = "has no secret, and this process has one"
    else:
        has = "has a different secret than this process"
    raise PeerError(f"rank {rank} (on {host}) {has}: neither uses what the other one says. {_FIX}")


class SealedStore:
    """A part of a store whose values carry tags.

    A tag is of the value's name, a counter and the value; a value that is older than one that was
    read before is refused.
    """

    def __init__(self, store: Store, key: bytes) -> None:
        self._store = store
        self._key = key
        self._written = 0
        self._read: dict[str, int] = {}

    def set(self, name: str, value: str) -> None:
        """Write a value."""
        self._written += 1
        tag = tag_of(self._key, "store", name, self._written, value)
        self._store.set(name, f"{tag.hex()} {self._written} {value}")

    def get(self, name: str) -> bytes:
        """Return a value.

        Raises:
            ValueError: no process of this meeting wrote it there, or it is older than one read
                before.
        """
        return self._checked(name, self._store.get(name))

    def multi_get(self, names: Sequence[str]) -> list[bytes]:
        """Return several values, as `get` does, at the price of one."""
        found = self._store.multi_get([*names])
        return [self._checked(*pair) for pair in zip(names, found, strict=True)]

    def _checked(self, name: str, found: bytes) -> bytes:
        tag, count, value = [*found.split(b" ", 2), b"", b""][:3]
        own = tag_of(self._key, "store", name, count, value).hex().encode()
        if not hmac.compare_digest(tag, own):
            raise ValueError(f"no process of this job wrote what the store holds as {name}")
        if int(count) < self._read.get(name, 0):
            raise ValueError(f"what the store holds as {name} was replaced by an older value")
        self._read[name] = int(count)
        return value

    def check(self, names: Sequence[str]) -> bool:
        """Whether the store has values with all of these names."""
        return self._store.check([*names])

    def wait(self, names: Sequence[str], limit: datetime.timedelta) -> None:
        """Wait until it has."""
        self._store.wait([*names], limit)


def awaited(
    store: Store | SealedStore, names: Sequence[str], limit: datetime.timedelta
) -> list[bytes]:
    """Return the values that all processes write in their own time; `names` are by rank.

    Raises:
        PeerError: one does not within the limit, or somebody else has written it.
    """
    try:
        store.wait([*names], limit)
    except RuntimeError as error:
        peer = next((rank for rank, name in enumerate(names) if not store.check([name])), 0)
        raise PeerError(
            f"rank {peer} did not respond within {limit.total_seconds():g} s: {OPENS}", peer
        ) from error
    try:
        return store.multi_get([*names])
    except ValueError as error:
        peer = next(rank for rank, name in enumerate(names) if f" {name} " in f"{error} ")
        raise PeerError(f"rank {peer} is refused: {error}", peer) from error


def prove(transport: Transport, key: bytes) -> None:
    """Prove to each process that this one knows the key, and make sure that each of them does.

    Every process must call this, before any uses what another one has sent.

    Raises:
        PeerError: whoever is at the other end of a connection doesn't know the key.
    """
    others = [peer for peer in range(transport.size) if peer != transport.rank]
    found = {peer: torch.zeros(TAG_BYTES, dtype=torch.uint8) for peer in others}
    arriving = [transport.receive(tag, peer) for peer, tag in found.items()]
    own = torch.frombuffer(bytearray(tag_of(key, "here", transport.rank)), dtype=torch.uint8)
    wait_all([transport.send(own, peer) for peer in others])
    wait_all(arriving)
    for peer, tag in found.items():
        if not hmac.compare_digest(tag.numpy().tobytes(), tag_of(key, "here", peer)):
            raise PeerError(
                f"rank {peer} is refused: whoever has its connection doesn't know this job's "
                f"secret. {_FIX}"
            )
