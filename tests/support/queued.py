"""Tasks of `evenstep.mxnet` that run until a test lets them end."""

import threading

from evenstep.mxnet.core.invoke import run


def held(context, *, reads=(), writes=()):
    """Queue a task that runs until the returned event is set."""
    event = threading.Event()
    run("held", context, lambda: event.wait(30), reads=reads, writes=writes)
    return event
