"""The engine of `evenstep.mxnet`: every test starts and ends without its worker threads."""

import logging

import pytest

from evenstep import mxnet as mx
from evenstep.mxnet import npx
from evenstep.mxnet.core.context import _gpu_device, _note_stand_in


@pytest.fixture(autouse=True)
def own_engine():
    """Close the process's engine, also after a test whose queued operation failed."""
    logging.getLogger("evenstep").setLevel(logging.ERROR)  # the note on stand-ins
    mx.random.seed(0)
    yield
    npx.reset_np()
    try:
        mx.waitall()
    finally:
        mx.close()
        _note_stand_in.cache_clear()
        _gpu_device.cache_clear()
        logging.getLogger("evenstep").setLevel(logging.NOTSET)
