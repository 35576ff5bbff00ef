"""Sums in one canonical order: the same bits wherever the terms were computed."""

from evenstep.collectives.canonical import CanonicalSum, add_in_order, canonical_sum, start_sum
from evenstep.collectives.local import LocalTransport, connect
from evenstep.collectives.owners import SumAtOwner, assign_owners
from evenstep.collectives.partition import Forest, forest
from evenstep.collectives.ranked import Collectives, ranked_sum, sent_elements
from evenstep.collectives.transport import Transfer, Transport, even_bounds, wait_all
from evenstep.collectives.tree import TreePlan, TreeSum, tree_plan, tree_sum, values_at_once

__all__ = [
    "CanonicalSum",
    "Collectives",
    "Forest",
    "LocalTransport",
    "SumAtOwner",
    "Transfer",
    "Transport",
    "TreePlan",
    "TreeSum",
    "add_in_order",
    "assign_owners",
    "canonical_sum",
    "connect",
    "even_bounds",
    "forest",
    "ranked_sum",
    "sent_elements",
    "start_sum",
    "tree_plan",
    "tree_sum",
    "values_at_once",
    "wait_all",
]
