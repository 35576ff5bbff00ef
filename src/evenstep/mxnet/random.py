"""Seeds of the contexts' random generators."""

from __future__ import annotations

from evenstep.mxnet.core.context import Context
from evenstep.mxnet.core.runtime import runtime

__all__ = ["seed"]


def seed(seed_state: int, ctx: Context | str = "all") -> None:
    """Set the seed of one context's generator, or of all. Without it, the seed is 0."""
    runtime().seed(int(seed_state), ctx if isinstance(ctx, Context) else None)
