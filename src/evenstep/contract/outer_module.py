"""Refuses code that computes with the user's module on a device that was given a copy of it."""

from __future__ import annotations

import contextlib

import optree
import torch

from evenstep.batch.rng import ShardRandomness
from evenstep.contract.module_state import kept
from evenstep.errors import ContractError
from evenstep.experiment import autocast
from evenstep.replicas import Replicas
from evenstep.replicas.replica import same_bits
from evenstep.shard.forward_backward import ShardWork
from evenstep.shard.loss import ShardObjective


def refuse_outer_module(replicas: Replicas, work: ShardWork, objective: ShardObjective) -> None:
    """Compute a shard on a copy of the model, and refuse code that writes the model's own buffers.

    A function in an attribute or a hook, such as `lambda x: self.norm(x)`, is not copied with the
    module. Where it reaches parameters, the first backward pass on a copy finds it.

    Raises:
        ContractError: names a buffer that was written.
    """
    home = replicas.home
    copies = [one for one in replicas.all if one is not home and one.device.kind == "cpu"]
    if not home.buffers or not copies or home.device.kind != "cpu":
        return
    copied = copies[0]
    copied.open_shard()
    own = optree.tree_map(lambda one: one.clone() if torch.is_tensor(one) else one, work.batch)
    with (
        kept(copied),
        ShardRandomness(work.random_seed),
        autocast("cpu", work.precision),
        contextlib.suppress(Exception),  # the check that follows meets it again
    ):
        objective(copied.module, own, work.examples)
    pairs = zip(home.buffer_names, home.buffers, home.opening, strict=True)
    written = [name for name, buffer, opening in pairs if not same_bits(buffer, opening)]
    if written:
        home.open_shard()
        raise ContractError(
            f"a shard that is computed on a copy of the model has written the buffer {written[0]} "
            f"of the model itself: an attribute or a hook is a function that refers to the model, "
            f"such as `lambda x: self.norm(x)`, and is not copied with it. Make it a method, or "
            f"use the module that forward or the hook is given"
        )
