"""Refuses code that computes with the user's module on a device that was given a copy of it."""

from __future__ import annotations

import contextlib

import torch

from evenstep.batch.rng import ShardRandomness
from evenstep.contract.leaves import graph_leaves
from evenstep.contract.module_state import kept
from evenstep.contract.outside.process_settings import ProcessSettings
from evenstep.contract.rehearsal import Rehearsal, cloned
from evenstep.errors import ContractError
from evenstep.options.experiment import autocast
from evenstep.replicas import Replica
from evenstep.replicas.replica import same_bits


def refuse_outer_module(home: Replica, copied: Replica | None, rehearsal: Rehearsal) -> None:
    """Compute a shard on a copy of the model, and refuse code that computes with the model itself.

    A function in an attribute or a hook, such as `lambda x: self.norm(x)`, is not copied with the
    module, and an objective may call a model from outside.

    Raises:
        ContractError: names a buffer that was written, or the loss depends on the model's own
            parameters.
    """
    if copied is None:
        return
    work, objective = rehearsal.works[0], rehearsal.objective
    if copied.buffers:
        copied.open_shard()
    own, total, settings = cloned(work.batch), None, ProcessSettings()
    with (
        settings,
        kept(copied),
        ShardRandomness(work.random_seed),
        autocast("cpu", work.precision),
        contextlib.suppress(Exception),  # the check that follows meets it again
    ):
        total, *_ = objective(copied.module, own, work.examples)
    settings.refuse_changed()
    _refuse_written_buffers(home)
    if total is not None and total.requires_grad:
        _refuse_reached(total, home, copied)


def _refuse_reached(total: torch.Tensor, home: Replica, copied: Replica) -> None:
    """Refuse a loss that a copy of the model gave, and that depends on the model's parameters."""
    own = {*map(id, home.parameters)} - {*map(id, copied.parameters)}
    if any(id(leaf) in own for leaf in graph_leaves(total)):
        raise ContractError(
            "the loss depends on parameters of the model itself where it is computed on a copy of "
            "the model, as each further device has one: objective(model, *batch) must call the "
            "model that it is given, not one from outside, such as self.model"
        )


def _refuse_written_buffers(home: Replica) -> None:
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
