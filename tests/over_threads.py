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
