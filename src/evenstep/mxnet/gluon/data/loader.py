"""`DataLoader`: batches of a data set, in an order that depends on seed and epoch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from evenstep.data import epoch_order
from evenstep.devices import intra_op_threads
from evenstep.errors import MXNetError
from evenstep.mxnet.core.array import NDArray, adopt, array_class
from evenstep.mxnet.core.context import cpu
from evenstep.mxnet.core.runtime import runtime
from evenstep.mxnet.gluon.data.dataset import ArrayDataset, Dataset


class DataLoader:
    """Batches of a data set, as arrays on cpu(0).

    Each iteration over it is the next epoch, whose order is evenstep's for the seed of
    `mx.random.seed` and the epoch.

    Args:
        dataset: a Gluon data set, or anything with a length and an index.
        batch_size: number of examples of a batch.
        shuffle: visit the examples in a new order in each epoch.
        sampler: numbers of the examples of an epoch, instead of `shuffle`.
        last_batch: what becomes of a short last batch: "keep" or "discard".
        batchify_fn: makes a batch from a list of examples; None to stack their parts.
        num_workers: not used: whole batches are taken from memory.
        options: not used.

    Raises:
        MXNetError: an argument is not supported.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        shuffle: bool = False,
        sampler: Sequence[int] | None = None,
        last_batch: str | None = None,
        batchify_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        if not isinstance(batch_size, int) or batch_size < 1:
            raise MXNetError(f"got batch_size={batch_size!r}: give an integer from 1")
        if last_batch not in (None, "keep", "discard"):
            raise MXNetError(f"got last_batch={last_batch!r}: use 'keep' or 'discard'")
        self._dataset = (
            ArrayDataset(dataset) if isinstance(dataset, NDArray | np.ndarray) else dataset
        )
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._sampler = sampler
        self._drops = last_batch == "discard"
        self._batchify = batchify_fn
        self._seed = runtime().current_seed
        self._epoch = 0

    def __len__(self) -> int:
        full, rest = divmod(len(self._dataset), self._batch_size)
        return full if self._drops or not rest else full + 1

    def __iter__(self) -> Iterator[Any]:
        order = self._order()
        for indices in order.split(self._batch_size)[: len(self)]:
            yield self._batch(indices)

    def _order(self) -> torch.Tensor:
        epoch, self._epoch = self._epoch, self._epoch + 1
        if self._sampler is not None:
            return torch.tensor(list(self._sampler))
        count = len(self._dataset)
        return epoch_order(count, self._seed, epoch) if self._shuffle else torch.arange(count)

    def _batch(self, indices: torch.Tensor) -> Any:
        like, dataset = array_class(), self._dataset
        if self._batchify is None and isinstance(dataset, Dataset):
            with intra_op_threads(1):  # more would compete with the lanes
                found = dataset.batch(indices)
            if found is not None:
                arrays = [adopt(one, cpu(), like) for one in found]
                return arrays[0] if len(arrays) == 1 else arrays
        examples = [dataset[i] for i in indices.tolist()]
        return self._batchify(examples) if self._batchify is not None else _stacked(examples, like)


def _stacked(examples: Sequence[Any], like: type[NDArray]) -> Any:
    """Return the parts of examples, each stacked to an array."""
    if isinstance(examples[0], tuple | list):
        return [_stacked(part, like) for part in zip(*examples, strict=True)]
    rows = [one.asnumpy() if isinstance(one, NDArray) else np.asarray(one) for one in examples]
    whole = np.stack(rows)
    return adopt(
        torch.from_numpy(whole.astype(np.float32) if whole.dtype == np.float64 else whole),
        cpu(),
        like,
    )
