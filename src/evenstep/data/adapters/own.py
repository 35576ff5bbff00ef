"""Batches of evenstep's own `Loader`, from any place in an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from evenstep.batch import Batch
from evenstep.data.digests import digest_of_index
from evenstep.data.loader import Loader, PartOf
from evenstep.data.order import Cursor, LoaderPlace


class Own:
    """The batches of a `Loader`, which are a function of its facts and of the epoch.

    Args:
        loader: the loader.
    """

    fetches_parts = True
    whole_because = ""
    draws_in: int | None = None

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._cursor = Cursor()
        self.last_examples = loader.last_examples

    def data(self) -> dict[str, object]:
        """Return what the batches of every epoch depend on."""
        return {"the kind of loader": "evenstep's own", **self._loader.facts()}

    def digest_of_examples(self) -> int:
        """Return a checksum of some examples."""
        return self._loader.digest_of_examples()

    def facts(self, cursor: Cursor) -> dict[str, object]:
        """Return what the batches of an epoch depend on besides."""
        order = self._loader.drawn_order(cursor.epoch)
        return {} if order is None else {"a digest of its order": digest_of_index(order)}

    def open(self, cursor: Cursor, saved: LoaderPlace | None) -> str:
        """Go to a batch of an epoch; there is nothing to say about it."""
        self._cursor = cursor
        return ""

    def batches(self, part: PartOf | None) -> Iterator[Batch]:
        """Yield the batches from the opened place on, or this process's part of each."""
        return self._loader.epoch(self._cursor, part)

    def snapshot_at(self, step: int, *, is_here: bool) -> dict[str, Any]:
        """Return what a checkpoint holds of the loader's own state: nothing."""
        return {}

    def snapshot_behind(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the loader's own state after an epoch: nothing."""
        return {}

    def digest_before(self, step: int) -> int | None:
        """Return a checksum of the order that a sampler has drawn; None without one."""
        order = self._loader.drawn_order(self._cursor.epoch)
        return None if order is None else digest_of_index(order)

    def close(self) -> None:
        """End nothing."""
