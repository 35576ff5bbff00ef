"""Estimates the memory of a training at its peak, besides activations and examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from evenstep.batch import contiguous_runs, dealt_pairs
from evenstep.collectives import tree_plan, values_at_once

_TENSORS = {"Adadelta": 2, "Adagrad": 1, "Adam": 2, "AdamW": 2, "Adamax": 2, "ASGD": 1, "Muon": 1}
_TENSORS |= {"NAdam": 2, "RAdam": 2, "RMSprop": 1, "Rprop": 2}
_MORE = ("momentum", "amsgrad", "centered")  # settings that ask for one more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The bytes of what a training holds.

    Attributes:
        parameters: of all parameters.
        gradients: of one set of gradients.
        state: of the optimizer's state after a step.
        held_state: of the optimizer's state now.
        largest: of the largest gradient.
    """

    parameters: int
    gradients: int
    state: int
    held_state: int = 0
    largest: int = 0


def sizes_of(parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> Sizes:
    """Return the sizes of a training; of an optimizer that is not torch's, its state is 0 at first.

    `parameters` are those of the model.
    """
    trained = [one.nbytes for one in parameters if one.requires_grad]
    held = state = 0
    for group in optimizer.param_groups:
        at_first = _tensors_of_state(optimizer, group)
        for one in group["params"]:
            now = _nbytes(optimizer.state[one]) if one in optimizer.state else 0
            held += now
            state += now or at_first * one.nbytes
    return Sizes(
        parameters=sum(one.nbytes for one in parameters),
        gradients=sum(trained),
        state=state,
        held_state=held,
        largest=max(trained, default=0),
    )


def _nbytes(state: Mapping[str, object]) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))


def _tensors_of_state(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> int:
    """Return how many tensors of a parameter's size one of torch's optimizers keeps for it."""
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith("torch.optim.") and kind is not torch.optim.Optimizer:
            is_muon = kind.__name__ == "Muon"
            more = sum(bool(group.get(setting)) for setting in _MORE if not is_muon)
            return _TENSORS.get(kind.__name__, 0) + more
    return 0


def peak_nbytes(
    sizes: Sizes,
    shards: int,
    memories: Sequence[object],
    *,
    processes: int = 1,
    owners: bool = False,
    checks: bool = True,
) -> list[int]:
    """Return the bytes that one process needs at its peak in each memory.

    They are what `trainer.step` needs for parameters, gradients and the optimizer's state, on
    devices of equal speed that compute each shard by themselves: where speeds differ, runs of
    shards end elsewhere in the tree, and a device may hold more sets of gradients. The memory of
    other processes of the machine that a process reads counts, too.

    Args:
        sizes: the bytes of each kind.
        shards: V.
        memories: the memory of each device; the first one has the user's model and the optimizer.
        processes: the number of processes that train together.
        owners: whether they are owners of the optimizer's state (`Owners()`).
        checks: whether the code is checked in the first steps.
    """
    run = _first_run(shards, processes)
    plan = tree_plan(shards, shards, run)
    runs = contiguous_runs(run, [1.0] * len(memories))
    if len({*memories}) == 1 and len(runs) > 1:
        runs = dealt_pairs(run, tuple(map(len, runs)))
    found = []
    for memory in dict.fromkeys(memories):
        own = [one for one, its in zip(runs, memories, strict=True) if its == memory]
        sets = float(values_at_once(plan, own))
        sets += len(own) > 1 and len(run) > 4 * len(own)  # a lane may be ahead of another
        is_home = memory == memories[0]
        if is_home and len({*memories}) > 1:
            sets += 0.5  # sometimes a whole one: of a shard that another memory's device has taken
        if processes > 1 and is_home and not owners:
            sets += len(plan.partials) + 1 + (processes - 1) / processes
        kept = sizes.parameters
        if is_home:
            kept += sizes.state // (processes if owners else 1)
        peak = kept + sets * sizes.gradients
        if checks and is_home and len(run) > 1:
            first = sizes.parameters + sizes.held_state + 3 * sizes.gradients
            peak = max(peak, kept + 2 * sizes.gradients, first)
        found.append(int(peak) + 2 * sizes.largest)
    return found


def _first_run(shards: int, processes: int) -> range:
    """Return the shards of the first of several processes, which has as many as any."""
    return range(len(contiguous_runs(range(shards), [1.0] * processes)[0]))
