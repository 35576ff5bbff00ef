"""Seeds: functions of the experiment's seed, the epoch, the step and the shard alone."""

from __future__ import annotations

import hashlib
import operator


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on `parts` alone (SHA-256 of their text)."""
    text = ""
    for part in parts:
        text += f"/str:{part}" if isinstance(part, str) else f"/int:{operator.index(part)}"
    return int.from_bytes(hashlib.sha256(text[1:].encode()).digest()[:8], "little") >> 1


def shard_seed(seed: int, epoch: int, step: int, shard: int) -> int:
    """Return the seed for the random ops of one shard in one training step."""
    return derive_seed("shard", seed, epoch, step, shard)
