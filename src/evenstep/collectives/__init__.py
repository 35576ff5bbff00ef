"""Sums in one canonical order, whoever computed the terms."""

from evenstep.collectives.tree import TreePlan, TreeSum, tree_plan, tree_sum

__all__ = ["TreePlan", "TreeSum", "tree_plan", "tree_sum"]
