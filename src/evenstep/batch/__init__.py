"""A minibatch cut into shards, their assignment to processes, and their random numbers."""

from evenstep.batch.assignment import ProcessAssignment, contiguous_runs, dealt_pairs
from evenstep.batch.cut import Batch, Cut, Part, count_examples, cut_batch, shard_bounds
from evenstep.batch.own_shards import Shards
from evenstep.batch.whole import shared

__all__ = [
    "Batch",
    "Cut",
    "Part",
    "ProcessAssignment",
    "Shards",
    "contiguous_runs",
    "count_examples",
    "cut_batch",
    "dealt_pairs",
    "shard_bounds",
    "shared",
]
