"""Loaders: how torch's DataLoader makes the iterator of an epoch, and ends its worker processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch.utils.data import DataLoader

from evenstep.private_torch.names import attribute, private

makes_iterator: Callable[[type[DataLoader[Any]]], object] = attribute(
    DataLoader,
    "_get_iterator",
    "see whether a subclass makes batches in its own way",
    public_way=lambda _: None,
)
"""Return the method by which a class of loaders makes an iterator."""


def _when_freed(_iterator: object) -> None:
    """Leave the workers to the iterator's destructor."""


_end: Callable[[Any], None] = private(
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
    "_shutdown_workers",
    "end worker processes at once",
    public_way=_when_freed,
)
_kept_iterator = attribute(
    DataLoader(cast("Any", [])), "_iterator", "begin each epoch of persistent workers alike"
)


def end_workers(iterator: Any) -> None:
    """End the worker processes of a `DataLoader`'s iterator, if it has some.

    Its `__del__` does this too, but not while a traceback holds it.
    """
    if _end is not _when_freed and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def end_kept_workers(loader: DataLoader[Any]) -> None:
    """End the worker processes that a loader has kept from its last epoch; the next starts new."""
    end_workers(_kept_iterator(loader))
    loader._iterator = None  # else the loader would wait for them
