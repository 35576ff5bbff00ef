"""Processes played by threads, each with its own end of the links."""

import concurrent.futures

from evenstep.collectives import connect


def on_each(links, function):
    """Return `function(end)` of every end, called at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(links)) as pool:
        futures = [pool.submit(function, end) for end in links]
        return [future.result(60) for future in futures]


def on_each_of(size, function, *, timeout_s=60.0):
    """Return `function(links)` of `size` ends that are linked to each other."""
    return on_each(connect(size, timeout_s=timeout_s), function)


class Counting:
    """Links that count the bytes that they send."""

    def __init__(self, links):
        self._links = links
        self.rank, self.size = links.rank, links.size
        self.sent = 0

    def send(self, tensor, to, tag=0):
        self.sent += tensor.nbytes
        return self._links.send(tensor, to, tag)

    def receive(self, tensor, source, tag=0):
        return self._links.receive(tensor, source, tag)
