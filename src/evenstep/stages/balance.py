"""Cuts a network into stages of about equal numbers of bytes, or of about equal times."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence

from torch import nn

from evenstep.errors import ModelError, counted


def balanced_stages(parts: Mapping[str, float], count: int) -> dict[str, int]:
    """Return the module that begins each of `count` stages, so that the largest is smallest.

    Args:
        parts: the size (in bytes, or in seconds) of each part of a model, by the module's name, in
            their order (see `parts_of`).
        count: the number of stages.

    Raises:
        ModelError: there are too few parts.
    """
    if len(parts) < count:
        raise ModelError(
            f"the model can't be cut into {count} stages: it has "
            f"{counted(len(parts), 'part')} with parameters. Use fewer stages, or name the modules "
            f"that begin them"
        )
    names, starts = [*parts], balance([*parts.values()], count)
    return {names[start]: stage for stage, start in enumerate(starts)}


def balance(sizes: Sequence[float], runs: int) -> list[int]:
    """Return where each of `runs` contiguous runs of `sizes` begins; none is empty.

    The largest sum of a run is as small as possible, and then the runs before it end as early as
    possible (the linear partition problem, by dynamic programming).
    """
    ends = [0, *itertools.accumulate(sizes)]

    @functools.cache
    def best(first: int, left: int) -> tuple[float, int]:
        """Return the largest sum of `left` runs from `first` on, and where the second begins."""
        if left == 1:
            return ends[-1] - ends[first], len(sizes)
        cuts = range(first + 1, len(sizes) - left + 2)
        return min((max(ends[cut] - ends[first], best(cut, left - 1)[0]), cut) for cut in cuts)

    starts = [0]
    for left in range(runs, 1, -1):
        starts.append(best(starts[-1], left)[1])
    return starts


def parts_of(model: nn.Module) -> dict[str, int]:
    """Return the parts of a model that a cut may lie between, with their bytes, in order.

    The result depends on nothing but the model's layers. A cut lies before a child of a Sequential
    or a ModuleList, or of the model itself. Other modules, such as residual blocks, stay whole,
    unless they hold such a chain of blocks themselves. A parameter counts where it is registered
    first.
    """
    return dict(_parts(model, "", set()))


def _parts(module: nn.Module, name: str, seen: set[nn.Parameter]) -> list[tuple[str, int]]:
    has_own = bool([*module.parameters(recurse=False)])
    if name and (has_own or not (_is_chain(module) or _has_blocks(module))):
        size = _bytes_of(module, seen)
        return [(name, size)] if size else []
    children = [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]
    return [part for path, child in children for part in _parts(child, path, seen)]


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential | nn.ModuleList)


def _has_blocks(module: nn.Module) -> bool:
    """Return whether a chain inside a module has at least two children that have layers."""
    chains = (one for one in module.modules() if _is_chain(one))
    return any(sum(bool([*one.children()]) for one in chain.children()) > 1 for chain in chains)


def _bytes_of(module: nn.Module, seen: set[nn.Parameter]) -> int:
    """Return the bytes of a module's parameters that are not in `seen`, and add them to it."""
    new = [one for one in module.parameters() if one not in seen]
    seen.update(new)
    return sum(one.numel() * one.element_size() for one in new)
