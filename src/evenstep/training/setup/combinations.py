"""Which options of a training go together: one table, and one function that refuses the rest."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from evenstep.devices import Device, in_stages
from evenstep.errors import InputError
from evenstep.nn import sliced_layers
from evenstep.stages.plan import StagePlan, find_stages
from evenstep.steps.executors import lockstep_option
from evenstep.training.setup.arguments import Chosen

_MOST_SIDE_BY_SIDE = 1_024  # shards, each with a thread and a replica

_COMPILED = "shards that wait for each other, or pass between devices, can't be compiled"
_DIVIDED = "devices compute whole shards, the slices of one shard, or a stage each"
_AT_ONCE = "shards that are all under way at once can't share their devices in turn"
_APART = "processes don't wait for each other's shards"
_FLOAT32 = "portable arithmetic has kernels for float32 on CPUs"
_ONE_PROCESS = "start one process, which uses all devices of this machine, or leave it out"

APART: Mapping[tuple[str, str], tuple[str, str]] = {
    ("compile", "lockstep"): (_COMPILED, ""),
    ("compile", "Stages"): (_COMPILED, ""),
    ("compile", "Slices"): (_COMPILED, ""),
    ("Stages", "Slices"): (_DIVIDED, ""),
    ("Stages", "lockstep"): (_AT_ONCE, ""),
    ("Slices", "lockstep"): (_AT_ONCE, ""),
    ("Slices", "in flight"): ("all devices meet in each layer of each shard", ""),
    ("compile", "portable"): ("a compiled shard has kernels of its own", ""),
    ("bf16", "portable"): (_FLOAT32, ""),
    ("portable", "GPU"): (_FLOAT32, "name CPU devices"),
    ("lockstep", "processes"): (_APART, _ONE_PROCESS),
}
"""What does not go together: why, and what to do (else: use one of them only)."""


def refuse_combinations(chosen: Chosen, *, is_alone: bool) -> None:
    """Refuse options that don't go together.

    Args:
        chosen: the options.
        is_alone: whether there are no other processes.

    Raises:
        InputError: two of them don't; the message names both.
    """
    used = _used(chosen, is_alone=is_alone)
    for (one, other), (reason, remedy) in APART.items():
        if one in used and other in used:
            remedy = remedy or "use one of them only"
            raise InputError(f"got {used[one]} and {used[other]}, but {reason}: {remedy}")
    if chosen.is_lockstep and chosen.experiment.shards > _MOST_SIDE_BY_SIDE:
        raise InputError(
            f"got {used['lockstep']} and shards={chosen.experiment.shards}, but at most "
            f"{_MOST_SIDE_BY_SIDE} shards can run side by side: each has a thread and a copy of "
            f"the model's layers"
        )


def _used(chosen: Chosen, *, is_alone: bool) -> dict[str, str]:
    """Return the options that have a place in the table, as the user has written them."""
    experiment, layout = chosen.experiment, chosen.layout
    no_cpu = next((str(device) for device in chosen.devices if device.is_accelerator), "")
    found = {
        "compile": "compile=True" * experiment.compile,
        "bf16": "precision='bf16'" * (experiment.precision == "bf16"),
        "portable": "arithmetic='portable'" * (experiment.arithmetic == "portable"),
        "lockstep": lockstep_option(experiment) * chosen.is_lockstep,
        "Stages": "Stages(...)" * (layout.stages is not None),
        "Slices": "Slices()" * layout.has_slices,
        "Owners": "Owners()" * layout.has_owners,
        "in flight": f"max_in_flight={chosen.max_in_flight}" * chosen.overlaps,
        "GPU": no_cpu,
        "processes": "several processes" * (not is_alone),
    }
    return {name: written for name, written in found.items() if written}


def refuse_without_threads(chosen: Chosen, *, have_threads: bool) -> None:
    """Refuse devices without threads of their own that would have to wait for each other."""
    if chosen.is_lockstep and len(chosen.devices) > 1 and not have_threads:
        raise InputError(
            f"with {lockstep_option(chosen.experiment)} the {len(chosen.devices)} devices wait for "
            f"each other, which lanes without threads can't: use one device, or ThreadLanes"
        )


def chosen_stages(chosen: Chosen, model: nn.Module) -> StagePlan | None:
    """Return the stages of the network; None without any, or with a single one.

    Raises:
        InputError: they can't be used with these devices.
        ModelError: they don't fit the model.
    """
    if chosen.layout.stages is None:
        return None
    stages = find_stages(chosen.layout.stages.names, model, chosen.devices)
    return stages if stages.count > 1 else None


def refuse_unfit_slices(chosen: Chosen, model: nn.Module) -> None:
    """Refuse to compute slices on several devices where there are none, or none that fit."""
    if not chosen.layout.has_slices:
        return
    if not sliced_layers(model):
        raise InputError(
            "got Slices(), but no layer of the model has slices: call "
            "evenstep.nn.slice_(model, slices=2) first"
        )
    for device in chosen.devices:
        if device.threads != chosen.experiment.threads:
            raise InputError(
                f"got Slices() and {device}: only devices with the experiment's number of threads "
                f"can compute slices together; leave Slices out, the results are the same"
            )


def shards_at_once(chosen: Chosen) -> int:
    """Return how many shards of a step each device computes at the same time."""
    return -(-chosen.experiment.shards // len(chosen.devices)) if chosen.is_lockstep else 1


def lane_devices(chosen: Chosen, stages: StagePlan | None) -> list[Device]:
    """Return the device of each lane, which knows those of the other stages."""
    return in_stages(chosen.devices, stages.count if stages else 1)


def holders(chosen: Chosen, stages: StagePlan | None) -> list[Device]:
    """Return the device of each replica: a stage, or a slice, is computed on a part of one."""
    devices = lane_devices(chosen, stages)
    if stages is not None:
        return devices[:: stages.count]
    if chosen.layout.has_slices:  # in a memory of its own, a device holds its slices only
        return [one if one.memory == devices[0].memory else devices[0] for one in devices]
    return devices
