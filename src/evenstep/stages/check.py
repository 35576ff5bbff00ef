"""Checks the graph of a shard's loss: every parameter is used in the stage that it lies in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from evenstep.errors import ContractError
from evenstep.private_torch.graph import nodes_of
from evenstep.replicas import Replica
from evenstep.stages.carried import is_carry
from evenstep.stages.plan import StagePlan
from evenstep.stages.shard import StagedShard


def check_graph(
    shard: StagedShard, total: torch.Tensor, replica: Replica, stages: StagePlan
) -> None:
    """Make sure that a loss uses every parameter and every tensor in the stage that it lies in.

    Raises:
        ContractError: names a parameter that is used elsewhere; or, where devices have memory of
            their own, a tensor that was not passed to a module.
    """
    places = _stages_of_parameters(replica, stages)
    has_own_memory = replica.device.own_memory
    for node in nodes_of(total):
        here = shard.stage_of(node)
        for source, _ in node.next_functions:
            parameter = getattr(source, "variable", None)
            if parameter is not None and id(parameter) in places:
                name, lies_in = places[id(parameter)]
                if here not in lies_in and (here < min(lies_in) or has_own_memory):
                    raise _used_elsewhere(name, min(lies_in), here)
                if has_own_memory and len(lies_in) > 1:
                    raise _tied(name, lies_in)
            elif (
                has_own_memory
                and source is not None
                and parameter is None
                and shard.stage_of(source) < here
                and not is_carry(node)
            ):
                raise _not_carried(source, shard.stage_of(source), here)


def _stages_of_parameters(
    replica: Replica, stages: StagePlan
) -> Mapping[int, tuple[str, frozenset[int]]]:
    """Return each parameter's name, and the stages that it is registered in, by its `id`."""
    found: dict[int, tuple[str, frozenset[int]]] = {}
    for name, parameter, stage in _registered(replica.module, stages):
        known, lies_in = found.get(id(parameter), (name, frozenset[int]()))
        found[id(parameter)] = known, lies_in | {stage}
    return found


def _registered(model: nn.Module, stages: StagePlan) -> Iterator[tuple[str, nn.Parameter, int]]:
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            yield f"{name}.{key}", parameter, stages.of_module[name]


def _used_elsewhere(name: str, stage: int, here: int) -> ContractError:
    return ContractError(
        f"the parameter {name} lies in stage {stage} but is used in stage {here}, without a call "
        f"of its module: name in Stages(...) a module that forward calls, and that holds all that "
        f"is computed with {name}"
    )


def _tied(name: str, lies_in: frozenset[int]) -> ContractError:
    listed = " and ".join(map(str, sorted(lies_in)))
    return ContractError(
        f"the parameter {name} belongs to the stages {listed}, whose devices have memory of their "
        f"own: put all modules that share it into one stage"
    )


def _not_carried(node: Any, stage: int, here: int) -> ContractError:
    return ContractError(
        f"a tensor of stage {stage} ({node.name()}) is used in stage {here} without being passed "
        f"to one of its modules, but the stages' devices have memory of their own: pass it to a "
        f"module of stage {here}, or cut elsewhere (around a residual block, not inside)"
    )
