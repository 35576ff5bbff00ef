"""Every test starts and ends without worker threads."""

from mxnet_engine import own_engine

__all__ = ["own_engine"]
