"""Refuses code that computes with the user's module on a device that was given a copy of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from evenstep.errors import ContractError
from evenstep.replicas import Replica
from evenstep.replicas.replica import same_bits
from evenstep.shard.forward_backward import OuterModelError


@contextmanager
def on_copies_alone(home: Replica) -> Iterator[None]:
    """Inside `with`, shards are computed on a copy of the model; refuse one that uses the model.

    A function in an attribute or a hook, such as `lambda x: self.norm(x)`, is not copied with the
    module, and an objective may call a model from outside.

    Raises:
        ContractError: names a buffer that was written, or the loss depends on the model's own
            parameters.
    """
    try:
        yield
    except OuterModelError as error:
        raise ContractError(
            "the loss depends on parameters of the model itself where it is computed on a copy of "
            "the model, as each further device has one: objective(model, *batch) must call the "
            "model that it is given, not one from outside, such as self.model"
        ) from error
    finally:  # also where the shard has raised an error, which the step meets again
        if not home.device.is_accelerator:
            _refuse_written_buffers(home)


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
