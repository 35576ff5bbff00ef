"""Memory that processes share only if each has read what the others wrote there."""

import contextlib
import gc
import mmap
import os
import re
import socket
from pathlib import Path

import pytest
import torch

from evenstep.collectives import connect
from evenstep.distributed import shared_bytes
from evenstep.distributed.shared import memory as shared_memory
from launched import alone
from over_threads import on_each, peers_over

NBYTES = 1000


def memories(size):
    return on_each(connect(size), lambda end: shared_bytes(peers_over(end), NBYTES))


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [2, 5])
def test_what_one_process_writes_all_read(size):
    gc.collect()  # may close files of earlier tests
    before = open_files()
    found = memories(size)
    for rank, memory in enumerate(found):
        assert memory.shape == (NBYTES,)
        assert not memory.any()
        memory[rank] = 1 + rank
        assert all(other[rank] == 1 + rank for other in found)
        memory.zero_()
    del found, memory
    assert open_files() == before


def private(handle, nbytes):
    return torch.zeros(nbytes, dtype=torch.uint8)


def nothing(*_):
    return None


def refused(*_):
    raise OSError


@pytest.mark.parametrize(
    ("place", "name", "replaced"),
    [
        (shared_memory, "_mapped", private),
        (shared_memory, "_made_file", nothing),
        (os, "memfd_create", refused),
        (os, "posix_fallocate", refused),
        (mmap, "mmap", refused),
        (socket.socket, "bind", refused),
        (socket.socket, "connect", refused),
        (socket.socket, "accept", refused),
        (socket, "recv_fds", refused),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_memory_that_is_not_proved_to_be_shared_is_not_used(monkeypatch, place, name, replaced):
    before = open_files()
    monkeypatch.setattr(place, name, replaced, raising=False)
    assert memories(3) == [None] * 3
    assert open_files() == before


def test_memory_that_one_process_alone_has_for_itself_is_not_used(monkeypatch):
    mapped, calls = shared_memory._mapped, []

    def first_private(handle, nbytes):
        calls.append(handle)
        return private(handle, nbytes) if len(calls) == 1 else mapped(handle, nbytes)

    monkeypatch.setattr(shared_memory, "_mapped", first_private)
    assert memories(3) == [None] * 3


def test_a_stranger_who_finds_the_socket_gets_nothing(monkeypatch):
    """Names of abstract sockets are public (`/proc/net/unix`); the secret is not."""
    say, strangers = shared_memory.all_say, []

    def spying(peers, message, what):
        if what == "connected to" and peers.rank == 0:
            for name in re.findall(r"@(evenstep-\w+)", Path("/proc/net/unix").read_text()):
                stranger = socket.socket(socket.AF_UNIX)
                stranger.connect(f"\0{name}")
                stranger.sendall(b"x" * 64)
                strangers.append(stranger)
        return say(peers, message, what)

    monkeypatch.setattr(shared_memory, "all_say", spying)
    assert None not in memories(2)
    assert strangers
    for stranger in strangers:
        with stranger, contextlib.suppress(ConnectionResetError):
            stranger.settimeout(1)
            assert socket.recv_fds(stranger, 1, 1)[1] == []


@pytest.mark.parametrize("in_all", [False, True], ids=["in one", "in all"])
def test_whenever_a_process_is_killed_no_file_is_left(in_all):
    """The first process, or both, at each of the exchanges in turn."""
    before = {*os.listdir("/dev/shm")}
    finished = alone("killed.py", "all" if in_all else "one")
    assert finished.returncode == 0, finished.stderr
    assert len(finished.stdout.split()) >= 2  # times that a process was killed
    assert {*os.listdir("/dev/shm")} <= before
