"""Several shards computed as one batch, each with the bits that it has alone."""

import evenstep.arithmetic.together.parameters  # they register what they have
import evenstep.arithmetic.together.rules  # noqa: F401
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
