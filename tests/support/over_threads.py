"""Processes played by threads, each with a transport of its own."""

import concurrent.futures
import json
import time

import torch.distributed as dist

from evenstep.collectives import connect
from evenstep.distributed import Peers, StatusBoard


def on_each(ends, function):
    """Return `function(end)` of every end, called at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(ends)) as pool:
        futures = [pool.submit(function, end) for end in ends]
        return [future.result(60) for future in futures]


def on_each_of(size, function, *, timeout_s=60.0):
    """Return `function(transport)` of `size` transports that are connected to each other."""
    return on_each(connect(size, timeout_s=timeout_s), function)


def peers_over(transport):
    """Return the processes `host0`, `host1`, ... as the one with this transport sees them."""
    hosts = [f"host{rank}" for rank in range(transport.size)]
    store = dist.HashStore()
    for rank in range(1, transport.size):
        store.set(f"doing/{rank}", json.dumps({"at": time.time() - 7, "doing": "thinking"}))
    return Peers(transport, hosts, StatusBoard(store, transport.rank), on_one_machine=True)


class Counting:
    """A transport that counts the bytes that it sends."""

    def __init__(self, transport):
        self._transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.sent = 0

    def send(self, tensor, to, tag=0):
        self.sent += tensor.nbytes
        return self._transport.send(tensor, to, tag)

    def receive(self, tensor, source, tag=0):
        return self._transport.receive(tensor, source, tag)

    def close(self):
        self._transport.close()
