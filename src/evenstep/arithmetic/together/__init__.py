"""Several shards computed as one batch, each with the bits that it has alone."""

from evenstep.arithmetic.together.blocks import NotTogetherError, of_shards, shards_of
from evenstep.arithmetic.together.region import Region, computing_together

__all__ = ["NotTogetherError", "Region", "computing_together", "of_shards", "shards_of"]
