"""Rounds of messages through memory that all processes of a machine share.

In a round every process gets one message of every other one, or a piece of it: long messages take
several rounds. Each process has a word that counts its rounds, and two places for messages, used in
turn: when it writes to the same place again, all others have come to the round between, and so have
read what was there. An exchange that an exception has cut off in a wait is ended by the next one,
so no process takes a piece of an old message for a new one.

A process that waits looks at the word for a moment, if every process has a core of its own, and
then sleeps until it changes (futex(2)). It finds out that another one has ended by a lock on a byte
of the file (fcntl(2)), which the system releases, even if that process is killed.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
import threading
import time
from typing import Protocol

import torch

from evenstep.devices import usable_cores
from evenstep.distributed.process_group import Peers
from evenstep.distributed.shared.memory import NO, YES, all_say, shared_file
from evenstep.engine.interrupts import INTERRUPTS
from evenstep.errors import PeerError

PIECE_BYTES = 32 << 10
"""The most bytes of a message that one round carries."""

_LENGTH = struct.Struct("<q")
_WORDS_BYTES = 64  # of a process, and so in a cache line of its own
_COUNT, _LEFT, _TRIED = range(3)  # its words: the rounds, whether it has left, and one for a trial
_PLACE_BYTES = _LENGTH.size + PIECE_BYTES
_PROCESS_BYTES = _WORDS_BYTES + 2 * _PLACE_BYTES
_MOST = 0xFFFFFFFF  # a word has 32 bits, and wraps around

_SPIN_S = 200e-6
_LOOK_S = 0.05  # between two looks whether the other process has ended

_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}  # of the futex, by kind of processor
_WAIT, _WAKE_OP, _EVERYBODY = 0, 5, 0x7FFFFFFF
_SET_1, _ADD_1 = 1 << 12, 1 << 28 | 1 << 12


class Presence(Protocol):
    """Knows which processes have ended."""

    def is_gone(self, rank: int) -> bool:
        """Return whether a process has ended."""

    def close(self) -> None:
        """Let the others know that this process is gone."""


class SharedRounds:
    """The rounds of one process.

    Args:
        memory: zeros, uint8 (`nbytes_of(size)`,), the same in every process.
        rank, size: this process's number, and the number of processes.
        timeout_s: the longest wait for another process.
        presence: knows which processes have ended.
        spin_s: how long a wait looks at the word before it sleeps.

    Attributes:
        sleeps: how often this process has slept.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        rank: int,
        size: int,
        timeout_s: float,
        presence: Presence,
        *,
        spin_s: float = 0.0,
    ) -> None:
        self.sleeps = 0
        self._bytes = memoryview(memory.numpy())  # type: ignore[arg-type]
        self._words = self._bytes.cast("I")
        self._address = memory.data_ptr()
        self._rank, self._size = rank, size
        self._timeout_s, self._presence, self._spin_s = timeout_s, presence, spin_s
        self._limit_s = timeout_s
        self._others = [(rank + step) % size for step in range(1, size)]
        self._count = self._words[_word(rank, _COUNT)]
        self._is_waiting = False
        self._message, self._found = b"", list[bytes]()
        self._done = self._longest = 0  # bytes of the messages of the last exchange
        self._fence = threading.Lock()
        self._limit = (ctypes.c_long * 2)(0, int(1e9 * _LOOK_S))
        self._futex_number = _CALLS.get(platform.machine(), -1)
        self._futex = ctypes.CDLL(None).syscall
        number, address, integer = ctypes.c_long, ctypes.c_void_p, ctypes.c_uint
        self._futex.argtypes = [number, address, ctypes.c_int, integer, address, address, integer]

    @INTERRUPTS.shielded
    def exchange(self, message: bytes, patience: int = 1) -> list[bytes]:
        """Return every process's message, by rank; each process must call this method.

        With `patience`, a wait may take so many times the time limit. Signals interrupt waits only.

        Raises:
            PeerError: a process did not respond in time, or has left.
        """
        self._limit_s = patience * self._timeout_s
        try:
            self._exchange_pieces()  # of an exchange that was cut off
            self._message, self._done, self._longest = message, 0, max(1, len(message))
            self._found = found = [b""] * self._size
            found[self._rank] = message
            self._exchange_pieces()
            self._message, self._found = b"", []  # they may be large
            return found
        finally:
            if INTERRUPTS.pending:
                INTERRUPTS.deliver()

    def close(self) -> None:
        """Leave: processes that wait for this one get a PeerError."""
        self._change(_LEFT, _SET_1)
        self._presence.close()

    @property
    def works(self) -> bool:
        """Whether the system can change words."""
        self._change(_TRIED, _SET_1)
        return self._words[_word(self._rank, _TRIED)] == 1

    def _exchange_pieces(self) -> None:
        """Exchange what is left of the messages of the last exchange: a round for each piece."""
        while self._done < self._longest:
            if not self._is_waiting:
                own = self._message[self._done : self._done + PIECE_BYTES]
                self._write(_place(self._count), len(self._message), own)
                self._count = (self._count + 1) & _MOST
                self._is_waiting = True
                self._change(_COUNT, _ADD_1)
            self._wait_for_all()
            place = _place(self._count - 1)
            with self._fence:  # some processors would read the messages before the words
                for peer in self._others:
                    length, piece = self._read(peer, place, self._done)
                    self._longest = max(self._longest, length)
                    self._found[peer] += piece
            self._done, self._is_waiting = self._done + PIECE_BYTES, False

    def _write(self, place: int, length: int, piece: bytes) -> None:
        start = self._rank * _PROCESS_BYTES + place
        _LENGTH.pack_into(self._bytes, start, length)
        start += _LENGTH.size
        self._bytes[start : start + len(piece)] = piece

    def _read(self, peer: int, place: int, done: int) -> tuple[int, bytes]:
        """Return the length of a process's message, and its piece from byte `done` on."""
        start = peer * _PROCESS_BYTES + place
        (length,) = _LENGTH.unpack_from(self._bytes, start)
        start += _LENGTH.size
        return length, bytes(self._bytes[start : start + max(0, min(length - done, PIECE_BYTES))])

    def _wait_for_all(self) -> None:
        before, began_s = (self._count - 1) & _MOST, time.monotonic()
        for peer in self._others:
            if self._words[_word(peer, _COUNT)] == before:
                self._wait_for(peer, before, began_s)

    def _wait_for(self, peer: int, before: int, began_s: float) -> None:
        count, left = _word(peer, _COUNT), _word(peer, _LEFT)
        while self._words[count] == before:
            waited_s = time.monotonic() - began_s
            if waited_s < self._spin_s:
                os.sched_yield()
                continue
            is_gone = self._words[left] or (waited_s > _LOOK_S and self._presence.is_gone(peer))
            if self._words[count] != before:
                return
            if is_gone:
                raise PeerError(f"rank {peer} has left: it has closed the shared memory", peer)
            if waited_s > self._limit_s:
                raise PeerError(f"rank {peer} did not respond within {self._limit_s:g} s", peer)
            self._sleep(count, before)
            if INTERRUPTS.pending:
                INTERRUPTS.check()

    def _change(self, which: int, how: int) -> None:
        """Change one of this process's words, and wake those who sleep on its count.

        The system does it, so that on every processor what was written before is seen before.
        """
        woken = self._address + 4 * _word(self._rank, _COUNT)
        changed = self._address + 4 * _word(self._rank, which)
        self._futex(self._futex_number, woken, _WAKE_OP, _EVERYBODY, None, changed, how)

    def _sleep(self, word: int, value: int) -> None:
        """Sleep until a word is changed, unless it differs from `value`; at most for a moment."""
        self.sleeps += 1
        address, limit = self._address + 4 * word, ctypes.addressof(self._limit)
        self._futex(self._futex_number, address, _WAIT, value, limit, None, 0)


class Locks:
    """Presence by locks: each process holds the one on its byte of a file that all share."""

    def __init__(self, handle: int, rank: int) -> None:
        import fcntl  # not on Windows, where no memory is shared

        self._fcntl = fcntl
        self._handle = handle
        self._take(rank)

    def is_gone(self, rank: int) -> bool:
        """Return whether a process no longer holds its lock."""
        try:
            self._take(rank)
        except OSError:
            return False
        self._fcntl.lockf(self._handle, self._fcntl.LOCK_UN, 1, rank)
        return True

    def close(self) -> None:
        """Close the file, and so release the lock."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def _take(self, rank: int) -> None:
        self._fcntl.lockf(self._handle, self._fcntl.LOCK_EX | self._fcntl.LOCK_NB, 1, rank)


def nbytes_of(size: int) -> int:
    """Return the bytes of memory that the rounds of `size` processes need."""
    return size * _PROCESS_BYTES


def shared_rounds(
    peers: Peers, timeout_s: float, *, spin_s: float = _SPIN_S
) -> SharedRounds | None:
    """Return rounds through shared memory, or None in every process; each must call this."""
    found = shared_file(peers, nbytes_of(peers.size))
    if found is None:
        return None
    memory, handle = found
    # Who waits must not take the core of the process that it waits for.
    spin_s = spin_s if peers.size <= usable_cores() else 0.0
    rounds = None
    try:
        locks = Locks(handle, peers.rank)
    except OSError:
        os.close(handle)
    else:
        rounds = SharedRounds(memory, peers.rank, peers.size, timeout_s, locks, spin_s=spin_s)
    works = rounds is not None and sys.maxsize > _MOST and rounds.works
    if all(all_say(peers, YES if works else NO, "tried")):
        return rounds
    if rounds is not None:
        rounds.close()
    return None


def _place(count: int) -> int:
    """Return where a process's message lies in the round that follows so many."""
    return _WORDS_BYTES + (count & 1) * _PLACE_BYTES


def _word(rank: int, which: int) -> int:
    return rank * (_PROCESS_BYTES // 4) + which
