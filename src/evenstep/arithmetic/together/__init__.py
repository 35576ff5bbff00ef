"""Several shards computed as one batch, each with the bits that it has alone."""

from evenstep.arithmetic.together import parameters, rules  # noqa: F401 - they register rules
from evenstep.arithmetic.together.blocks import (
    NotTogetherError,
    is_of_shards,
    of_shards,
    shards_of,
)
from evenstep.arithmetic.together.region import computing_together
from evenstep.arithmetic.together.sums import add_up

__all__ = [
    "NotTogetherError",
    "add_up",
    "computing_together",
    "is_of_shards",
    "of_shards",
    "shards_of",
]
