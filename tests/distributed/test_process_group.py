"""Messages between processes, played by threads: over a local transport, and over gloo."""

import datetime
import threading

import pytest
import torch
import torch.distributed as dist

import evenstep
from evenstep.collectives import connect
from evenstep.distributed import Exchange, Peers, StatusBoard, agree
from evenstep.distributed.gloo import GlooTransport
from evenstep.distributed.step_report import batch_digest
from evenstep.errors import InputError, PeerError
from over_threads import on_each, peers_over
from patience import wait

SIZES = [0, 1, 4087, 4088, 4089, 100_000]
IT = Exchange("save", "it")


def gloo_transports(size, timeout_s=20):
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=20))
    return lambda rank: GlooTransport(store, rank, size, "lo", timeout_s)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_process_gets_every_message_by_rank(size):
    def exchange(end):
        peers = peers_over(end)
        return [peers.gather(bytes([end.rank]) * (n * (end.rank + 1)), IT) for n in SIZES]

    for gathered in on_each(connect(size), exchange):
        assert gathered == [
            [bytes([rank]) * (n * (rank + 1)) for rank in range(size)] for n in SIZES
        ]


def test_messages_go_over_gloo():
    make = gloo_transports(3)

    def exchange(rank):
        peers = peers_over(make(rank))
        return [peers.gather(bytes([rank]) * n * (rank + 1), IT) for n in SIZES]

    for gathered in on_each(range(3), exchange):
        assert gathered == [[bytes([rank]) * n * (rank + 1) for rank in range(3)] for n in SIZES]


@pytest.mark.parametrize("interface", ["lo", "nosuch0", None])
def test_a_process_that_cannot_connect_says_through_what(interface):
    """The other one has ended before it connected, or there is no such interface."""
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=0.2))
    through = interface or "the network interface of this host name"
    with pytest.raises(PeerError, match=f"^rank 0 can't connect .* through {through} \\(gloo: "):
        GlooTransport(store, 0, 2, interface, 0.2)


def test_over_gloo_too_a_late_process_is_named():
    make = gloo_transports(2, timeout_s=0.2)

    def exchange(rank):
        peers = peers_over(make(rank))
        if rank == 1:
            return peers
        with pytest.raises(PeerError) as caught:
            peers.gather(b"here", Exchange("step", "its part", 3))
        assert str(caught.value) == (
            "rank 1 did not respond within 0.2 s: rank 0 waited for its part of step 3; rank 1 is "
            "on host1, last seen 7 s ago, thinking"
        )
        return None

    on_each(range(2), exchange)


def test_over_gloo_a_process_that_has_left_is_named():
    make = gloo_transports(2)

    def exchange(rank):
        peers = peers_over(make(rank))
        if rank == 1:
            return
        with pytest.raises(PeerError, match=r"rank 1 has left: .*waited for its part of step 3"):
            peers.gather(b"here", Exchange("step", "its part", 3))
        return

    on_each(range(2), exchange)


CALLS = {
    "a call of one process": (
        [Exchange("save", "the checkpoint"), *[Exchange("step", "its part", 12)] * 2],
        "rank 0 (on host0) is in save, but rank 1 (on host1) is in step 12: every process must "
        "call save",
    ),
    "three calls": (
        [Exchange("save", "it"), Exchange("evaluate", "it"), Exchange("step", "its part", 7)],
        "rank 0 (on host0) is in save, but rank 1 (on host1) is in evaluate and rank 2 (on host2) "
        "is in step 7: every process must make the same calls in the same order",
    ),
    "the same call, other arguments": (
        [*[Exchange("evaluate", "the data")] * 2, Exchange("evaluate", "the metrics")],
        "rank 0 (on host0) is in evaluate (the data), but rank 2 (on host2) is in evaluate (the "
        "metrics): every process must make the same calls in the same order",
    ),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("calls", CALLS)
def test_calls_that_do_not_belong_together_are_named_in_every_process(calls, size):
    exchanges, text = CALLS[calls]

    def exchange(end):
        with pytest.raises(PeerError) as caught:
            peers_over(end).gather(bytes(size * (end.rank == 0)), exchanges[end.rank])
        return str(caught.value)

    assert on_each(connect(3), exchange) == [text] * 3


def test_other_steps_are_left_to_the_reports_of_the_steps():
    def exchange(end):
        return peers_over(end).gather(b"here", Exchange("step", "its part", end.rank))

    assert on_each(connect(2), exchange) == [[b"here"] * 2] * 2


X = torch.randn(4, 3)
BATCHES = {
    "a batch": (X, torch.arange(4)),
    "a list": [X, torch.arange(4)],
    "other values": (X + 1, torch.arange(4)),
    "another order": (X.flip(0), torch.arange(4)),
    "another shape": (X.reshape(4, 1, 3), torch.arange(4)),
    "another dtype": (X.view(torch.int32), torch.arange(4)),
    "other bits of zero": (X * 0, torch.arange(4)),
    "negative zeros": (X.abs() * -0.0, torch.arange(4)),
    "names": {"x": X, "y": torch.arange(4)},
    "bfloat16": (X.bfloat16(), torch.arange(4)),
    "no examples": (X[:0], torch.arange(0)),
    "shared": (X, torch.arange(4), evenstep.shared(X)),
    "another shared": (X, torch.arange(4), evenstep.shared(X + 1)),
}


def test_the_digest_of_a_batch_is_of_its_nesting_dtypes_shapes_and_bytes():
    digests = {name: batch_digest(batch, is_whole=True) for name, batch in BATCHES.items()}
    assert len({*digests.values()}) == len(BATCHES)
    assert batch_digest((X.T.clone().T, torch.arange(4)), is_whole=True) == digests["a batch"]


def test_the_digest_of_a_part_is_of_what_all_shards_share():
    def digest(examples, weights):
        return batch_digest({"x": examples, "w": evenstep.shared(weights)}, is_whole=False)

    assert digest(X[:2], X) == digest(X[2:], X)
    assert digest(X[:2], X) != digest(X[:2], X + 1)


def test_the_reason_why_a_process_left_reaches_those_that_wait_for_it():
    store = dist.HashStore()

    def exchange(end):
        peers = Peers(end, ["host0", "host1"], StatusBoard(store, end.rank), on_one_machine=True)
        if end.rank == 1:
            peers.leave("a problem of its own")
        else:
            expected = r"^rank 1 \(on host1\) failed: a problem of its own$"
            with pytest.raises(PeerError, match=expected):
                peers.gather(b"here", IT)

    on_each(connect(2), exchange)


class SlowStore:
    """Makes every thread but the main one wait until `free` is set."""

    def __init__(self):
        self.free, self.values = threading.Event(), {}

    def set(self, key, value):
        if threading.current_thread() is not threading.main_thread():
            wait(self.free)
        self.values[key] = value.encode()

    def check(self, keys):
        return all(key in self.values for key in keys)

    def get(self, key):
        return self.values[key]


def test_a_process_that_ends_at_once_was_seen():
    """Its status was published by a thread that may not have run yet."""
    store = SlowStore()
    with StatusBoard(store, 1):
        assert StatusBoard(store, 0).status_of(1) == (None, "last seen 0 s ago, starting")
        store.free.set()


def test_facts_that_differ_are_named_with_their_process():
    def compare(end):
        facts = {"the version of torch": f"2.{end.rank}", "shards": 8, "seed": end.rank // 2}
        with pytest.raises(InputError) as caught:
            agree(peers_over(end), facts, "what is trained", "step")
        return str(caught.value)

    assert set(on_each(connect(3), compare)) == {
        "the processes disagree about what is trained: the version of torch is 2.1 on rank 1 "
        "(host1), but 2.0 on rank 0 (host0); the version of torch is 2.2 on rank 2 (host2), but "
        "2.0 on rank 0 (host0); seed is 1 on rank 2 (host2), but 0 on rank 0 (host0)"
    }


def test_facts_that_agree_raise_nothing():
    assert (
        on_each(connect(3), lambda end: agree(peers_over(end), {"seed": 1}, "it", "step"))
        == [None] * 3
    )
