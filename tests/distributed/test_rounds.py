"""Rounds of messages through shared memory; processes are played by threads."""

import gc
import os
import threading
import time

import pytest
import torch

from evenstep.collectives import connect
from evenstep.distributed.shared import rounds as module
from evenstep.distributed.shared.rounds import PIECE_BYTES, SharedRounds, nbytes_of, shared_rounds
from evenstep.errors import PeerError
from over_threads import on_each, peers_over

SIZES = [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES]


class Present:
    """Knows of some processes that they have ended."""

    def __init__(self, *gone):
        self.gone = gone

    def is_gone(self, rank):
        return rank in self.gone

    def close(self):
        pass


def ends(size, timeout_s=20.0, gone=(), **options):
    memory = torch.zeros(nbytes_of(size), dtype=torch.uint8)
    return [
        SharedRounds(memory, rank, size, timeout_s, Present(*gone), **options)
        for rank in range(size)
    ]


def message(rank, number, nbytes):
    return bytes([rank, number % 251]) * (nbytes // 2) + bytes(nbytes % 2)


@pytest.mark.parametrize("spin_s", [0.0, 0.01], ids=["sleep", "spin"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_process_gets_every_message_by_rank(size, spin_s):
    made = ends(size, spin_s=spin_s)

    def exchange(rank):
        found = []
        for number, nbytes in enumerate(SIZES):
            own = message(rank, number, nbytes * (rank + 1) // size)
            found.append(made[rank].exchange(own))
        return found

    for found in on_each(range(size), exchange):
        assert found == [
            [message(rank, number, nbytes * (rank + 1) // size) for rank in range(size)]
            for number, nbytes in enumerate(SIZES)
        ]


def test_a_fast_process_writes_nothing_that_a_slow_one_has_not_read():
    made = ends(3)

    def exchange(rank):
        found = []
        for number in range(200):
            if rank == 2 and number % 10 == 0:
                time.sleep(0.002)
            found.append(made[rank].exchange(message(rank, number, 3000)))
        return found

    expected = [[message(rank, number, 3000) for rank in range(3)] for number in range(200)]
    assert on_each(range(3), exchange) == [expected] * 3


def test_the_count_of_rounds_may_wrap_around():
    memory = torch.zeros(nbytes_of(2), dtype=torch.uint8)
    words = memoryview(memory.numpy()).cast("I")
    for rank in range(2):
        words[rank * len(words) // 2] = 2**32 - 3
    made = [SharedRounds(memory, rank, 2, 20.0, Present()) for rank in range(2)]

    def exchange(rank):
        return [made[rank].exchange(message(rank, number, 9)) for number in range(8)]

    expected = [[message(rank, number, 9) for rank in range(2)] for number in range(8)]
    assert on_each(range(2), exchange) == [expected] * 2


def test_a_late_process_is_named():
    with pytest.raises(PeerError, match=r"^rank 1 did not respond within 0\.1 s$") as caught:
        ends(2, timeout_s=0.1)[0].exchange(b"here")
    assert caught.value.rank == 1


def test_a_process_that_has_ended_is_named_long_before_the_time_limit():
    began_s = time.monotonic()
    with pytest.raises(PeerError, match=r"^rank 2 has left: ") as caught:
        on_each(ends(3, timeout_s=60.0, gone=[2])[:2], lambda end: end.exchange(b"here"))
    assert caught.value.rank == 2
    assert time.monotonic() - began_s < 30


def test_a_process_that_leaves_is_named_but_its_last_message_is_read():
    first, second = ends(2)

    def leave(end):
        found = end.exchange(b"bye")
        end.close()
        return found

    def stay(end):
        return leave(end) if end is second else end.exchange(b"")

    assert on_each([second, first], stay) == [[b"", b"bye"]] * 2
    with pytest.raises(PeerError, match=r"^rank 1 has left: "):
        first.exchange(b"again")


def test_a_sleeping_process_is_woken():
    """Long before it would look by itself."""
    first, second = ends(2, timeout_s=60.0)
    look_s = first._limit[0] = 30
    began_s = time.monotonic()
    waiting = threading.Thread(target=first.exchange, args=[b"a"])
    waiting.start()
    while not first.sleeps:
        time.sleep(0.001)
    second.exchange(b"b")
    waiting.join()
    assert time.monotonic() - began_s < look_s / 2


class CutOffError(Exception):
    pass


def test_after_a_wait_that_was_cut_off_rounds_go_on(monkeypatch):
    first, second = ends(2)

    def cut_off(*_):
        raise CutOffError

    monkeypatch.setattr(first, "_sleep", cut_off)
    with pytest.raises(CutOffError):
        first.exchange(b"a0")
    monkeypatch.undo()

    def exchange(end):
        names = [b"a1", b"a2"] if end is first else [b"b0", b"b1", b"b2"]
        return [end.exchange(name) for name in names]

    found = on_each([first, second], exchange)
    assert found[0] == [[b"a1", b"b1"], [b"a2", b"b2"]]
    assert found[1] == [[b"a0", b"b0"], [b"a1", b"b1"], [b"a2", b"b2"]]


def test_after_a_long_message_that_was_cut_off_rounds_go_on(monkeypatch):
    """Cut off between two of its pieces: none of them is taken for a new message."""
    first, second = ends(2)
    long, waits = message(1, 0, 3 * PIECE_BYTES), []

    def cut_off(self=first, wait=first._wait_for_all):
        waits.append(self)
        if len(waits) == 2:
            raise CutOffError
        wait()

    def stay():
        return [second.exchange(name) for name in (long, b"b1", b"b2")]

    def leave():
        monkeypatch.setattr(first, "_wait_for_all", cut_off)
        with pytest.raises(CutOffError):
            first.exchange(b"a0")
        return [first.exchange(name) for name in (b"a1", b"a2")]

    found = on_each([leave, stay], lambda call: call())
    assert found[0] == [[b"a1", b"b1"], [b"a2", b"b2"]]
    assert found[1] == [[b"a0", long], [b"a1", b"b1"], [b"a2", b"b2"]]


def test_where_the_system_lacks_something_there_are_none_in_any_process(monkeypatch):
    def made():
        return on_each(connect(3), lambda end: shared_rounds(peers_over(end), 20.0))

    gc.collect()  # may close files of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    found = made()
    for one in found:
        one.close()
    del found, one
    monkeypatch.setattr(module, "_CALLS", {})
    assert made() == [None] * 3
    monkeypatch.undo()
    monkeypatch.delattr(os, "memfd_create")
    assert made() == [None] * 3
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
