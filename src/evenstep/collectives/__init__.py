"""Sums in one canonical order, whoever computed the terms."""

from evenstep.collectives.canonical import CanonicalSum, add_in_order, canonical_sum
from evenstep.collectives.local import LocalLinks, connect
from evenstep.collectives.partition import Forest, forest
from evenstep.collectives.transport import Links, Transfer, chunk_bounds, wait_all
from evenstep.collectives.tree import TreePlan, TreeSum, tree_plan, tree_sum

__all__ = [
    "CanonicalSum",
    "Forest",
    "Links",
    "LocalLinks",
    "Transfer",
    "TreePlan",
    "TreeSum",
    "add_in_order",
    "canonical_sum",
    "chunk_bounds",
    "connect",
    "forest",
    "tree_plan",
    "tree_sum",
    "wait_all",
]
