"""Tensors of a batch that every shard gets whole, instead of its own rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from evenstep.errors import BatchError, hides_own_frames


@dataclasses.dataclass(frozen=True, eq=False)
class Shared:
    """A tensor of a batch that every shard gets whole, made by `shared`."""

    tensor: torch.Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, torch.Tensor):
            kind = type(self.tensor).__name__
            raise BatchError(f"evenstep.shared got a value of type {kind}: give one tensor")
        if not is_plain(self.tensor):
            raise BatchError(f"evenstep.shared got {kind_of(self.tensor)}")


@hides_own_frames
def shared(tensor: torch.Tensor) -> Shared:
    """Mark a tensor of a batch that every shard gets whole, instead of its own rows.

        def objective(model, X, y, weights):
            loss = F.cross_entropy(model(X), y, weights, reduction="sum")
            return loss, weights[y].sum()

        trainer.step(X, y, evenstep.shared(weights))

    It may appear anywhere in a batch for `step`, `evaluate` or `predict`. Objectives, losses and
    metrics receive the plain tensor, detached from its graph. All shards of a device read the same
    copy, so writing to it is refused.

    Args:
        tensor: any tensor.

    Raises:
        BatchError: it is not a tensor.
    """
    return Shared(tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has data in rows, of which shards can be cut."""
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested)


def kind_of(tensor: torch.Tensor) -> str:
    """Return in words what a tensor is that is not plain, and what to give instead."""
    if tensor.is_nested:
        return "a nested tensor: give a padded one, and one with the lengths"
    if tensor.is_meta:
        return "a tensor without data (on torch's meta device): give one with data"
    return f"a sparse tensor ({tensor.layout}): give a dense one, such as tensor.to_dense()"


def transposed_or_shared(leaves: Mapping[str, object], lengths: Mapping[str, int]) -> str:
    """Return what to do about tensors of a batch that differ in their number of examples.

    `leaves` has the batch's tensors by their names in messages, `lengths` the number of rows of
    each that is cut: the first has as many as there are examples.
    """
    share = "one that every shard needs whole as evenstep.shared(tensor)"
    examples = next(iter(lengths.values()))
    for name, length in lengths.items():
        leaf = leaves[name]
        assert isinstance(leaf, torch.Tensor)
        if length != examples and leaf.ndim > 1 and examples in leaf.shape[:2]:
            return (
                f"{name} has {examples} along dimension {leaf.shape.index(examples)}: give "
                f"{name}.transpose(0, 1) if these are the examples (as in a recurrent state), or "
                f"{share}"
            )
    return f"give {share}"
