"""Computes shards after others: what a shard gives must not depend on those before it.

The check is made on fresh copies of the model. On one, a shard is computed first; on another, after
a second shard. Both must give the same bits, and leave the same values in the module's attributes.
So state is found whose second update changes nothing (the first value seen, a running maximum), and
state that has no effect yet (behind a weight that starts at zero). An attribute that each shard
writes before it reads it, or whose value depends on shapes alone, is the same on both copies.
"""

from __future__ import annotations

from collections.abc import Callable

from evenstep.contract.module_state import (
    Attributes,
    attributes_of,
    changed_attributes,
    counts_set,
    differing_attributes,
    differing_counts,
    named,
    state_of,
)
from evenstep.contract.repeat import REMEDY, ShardResult, first_difference, repeat_error
from evenstep.errors import ContractError
from evenstep.replicas import Replica

# Divisible by 64, 625, 1,000 and 10,000, and by all numbers up to 16; an integer may be read before
# or after it is increased.
_VERY_MANY = (1_000_000, 999_999, 720_720, 720_719)


def refuse_history(replica: Replica, fresh: ShardResult, later: ShardResult) -> None:
    """Refuse a shard that gives or leaves something else after other shards.

    Both results were computed on copies of `replica`: `fresh` first, `later` after others.
    """
    passed = differing_attributes(fresh.attributes, later.attributes)
    differing = first_difference(replica, fresh, later)
    if differing:
        opening = attributes_of(replica.module)
        raise repeat_error(differing, passed or changed_attributes(opening, fresh.attributes))
    _refuse(passed)


def refuse_deciding_counts(
    replica: Replica,
    fresh: ShardResult,
    later: ShardResult,
    compute: Callable[[], ShardResult | None],
) -> None:
    """Refuse a shard that gives something else after very many shards.

    Integers that other shards have changed may be notes. So they are set to large numbers.
    `compute` computes the shard once more on `replica`, on which `later` was computed; it returns
    None if it can't.
    """
    counts = differing_counts(fresh.attributes, later.attributes)
    if not counts:
        return
    for many in _VERY_MANY:
        with counts_set(replica.module, counts, many):
            result = compute()
        differing = result and first_difference(replica, fresh, result)
        if differing:
            names = ", ".join(map(named, counts))
            raise ContractError(
                f"what a shard gives depends on {names}, which other shards change, too: with "
                f"{many} there, {differing.replace('the second time', 'from before')}. How many "
                f"shards were computed before depends on the devices. {REMEDY}"
            )


def refuse_passed_on(fresh: Attributes, replica: Replica) -> None:
    """Refuse attributes in which a replica has other values than a shard leaves on a fresh copy."""
    _refuse(differing_attributes(fresh, state_of(replica)))


def _refuse(passed: list[str]) -> None:
    if passed:
        raise ContractError(
            f"{passed[0]} has a different value after a shard if other shards were computed "
            f"before it: state that is passed from shard to shard, such as a counter, a running "
            f"mean or the first value seen, depends on which device computes which shard. {REMEDY}"
        )
