"""What an objective returns besides its loss, put together over the shards of a step."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evenstep.checkpoint.codec import decode, encode
from evenstep.collectives import tree_sum
from evenstep.errors import ModelError
from evenstep.shard.evaluation import dim_of_rows
from evenstep.shard.forward_backward import Leaf

_ONE_DIM = "permute its dimensions, or use a different number of shards"

_SHAPE = "the nesting of the outputs"  # no name that `encode` gives


def join_step_outputs(
    leaves: Sequence[Leaf | None], examples: Sequence[int], dims: Sequence[int]
) -> dict[str, Any]:
    """Return the outputs of a step from those of its shards.

    A pair (total, count) becomes the sum of the totals over the sum of the counts, both in the
    canonical tree. So does the sum of single numbers. Other tensors, with a row for each example,
    are joined in the order of the batch.

    Args:
        leaves: what each shard's objective returned; None for an empty shard.
        examples: the number of examples of each shard.
        dims: the dimensions that the examples of an output may lie along.

    Raises:
        ModelError: the shards returned other outputs, or one of other kinds or shapes.
    """
    shards = [leaf[2] if len(leaf) > 2 else {} for leaf in leaves if leaf is not None]
    names = [*shards[0]]
    for shard, outputs in enumerate(shards):
        if outputs.keys() != shards[0].keys():
            raise ModelError(
                f"the objective returned the outputs {_listed(outputs)} for shard {shard}, but "
                f"{_listed(shards[0])} for shard 0: it must return the same names for every shard"
            )
    sizes = [*examples[: len(shards)]]
    return {name: _joined(name, [one[name] for one in shards], sizes, dims) for name in names}


def _joined(name: str, values: Sequence[Any], examples: Sequence[int], dims: Sequence[int]) -> Any:
    kinds = {_kind(value) for value in values}
    if len(kinds) > 1:
        raise ModelError(
            f"the objective returned {' and '.join(sorted(kinds))} as the output {name!r} of "
            f"different shards: it must return the same kind for every shard"
        )
    if kinds == {"a pair"}:
        totals, counts = zip(*values, strict=True)
        total, count = _sum_of(name, totals), _sum_of(name, counts)
        return total / count if isinstance(total, torch.Tensor) or count else float("nan")
    if kinds == {"a number"}:
        return _sum_of(name, values)
    what = f"the output {name!r}"
    return torch.cat([*values], dim_of_rows(values, examples, dims, what, _ONE_DIM))


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return "a pair"
    return "rows" if isinstance(value, torch.Tensor) and value.ndim else "a number"


def _sum_of(name: str, values: Sequence[Any]) -> Any:
    """Return a canonical sum: of single numbers in float64, of tensors in their own dtype."""
    if all(not isinstance(value, torch.Tensor) or value.numel() == 1 for value in values):
        return tree_sum([float(value) for value in values], operator.add)
    shapes = {tuple(torch.as_tensor(value).shape) for value in values}
    if len(shapes) > 1:
        found = " and ".join(map(str, sorted(shapes)))
        raise ModelError(
            f"the objective returned totals of the shapes {found} as the output {name!r} of "
            f"different shards: they can't be added"
        )
    return tree_sum([*values], torch.add)


def pack_outputs(outputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return outputs of shards as tensors by name, to be sent to other processes."""
    plain, tensors = encode(list(outputs))
    return {**tensors, _SHAPE: torch.tensor([*json.dumps(plain).encode()], dtype=torch.uint8)}


def unpack_outputs(named: Mapping[str, torch.Tensor]) -> list[Any]:
    """Return what `pack_outputs` was given."""
    plain = json.loads(bytes(named[_SHAPE].tolist()))
    outputs: list[Any] = decode(plain, named.__getitem__)
    return outputs


def _listed(outputs: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, sorted(outputs))) or "none"
