"""A minibatch cut into shards: where, for which process, and with which random numbers."""

from evenstep.batch.assignment import Dealing, contiguous_runs
from evenstep.batch.cut import Batch, Cut, Part, count_examples, cut_batch, shard_bounds

__all__ = [
    "Batch",
    "Cut",
    "Dealing",
    "Part",
    "contiguous_runs",
    "count_examples",
    "cut_batch",
    "shard_bounds",
]
