"""Refuses code that computes with the user's module on a device that was given a copy of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from evenstep.errors import ContractError
from evenstep.private_torch.tensors import version_of
from evenstep.replicas import Replica
from evenstep.replicas.replica import same_bits
from evenstep.shard.forward_backward import OuterModelError


@contextmanager
def on_copies_alone(home: Replica) -> Iterator[None]:
    """Inside `with`, shards are computed on a copy of the model; refuse one that uses the model.

    A function in an attribute or a hook, such as `lambda x: self.norm(x)`, is not copied with the
    module, and an objective may call a model from outside.

    Raises:
        ContractError: names a buffer that was written, or a parameter whose gradient was cleared;
            or the loss depends on the model's own parameters.
    """
    try:
        with _uncleared_gradients(home):
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


@contextmanager
def _uncleared_gradients(home: Replica) -> Iterator[None]:
    """Refuse shards on a copy of the model that clear or change the gradients of the model itself.

    Another device may just compute these. A parameter without a gradient gets one of zeros here.
    """
    pairs = zip(home.names, home.parameters, strict=True)
    learning = [(name, one) for name, one in pairs if one.requires_grad]
    before = [one.grad for _, one in learning]
    for (_, one), gradient in zip(learning, before, strict=True):
        if gradient is None:
            one.grad = one.detach().new_zeros(()).expand_as(one)  # takes no memory
    there = [(one.grad, version_of(one.grad)) for _, one in learning if one.grad is not None]
    try:
        yield
        for (name, one), (gradient, version) in zip(learning, there, strict=True):
            if one.grad is not gradient or version_of(gradient) != version:
                raise ContractError(
                    f"the objective, or forward, clears or writes the gradient of {name} of the "
                    f"model itself, which a different device may be computing: leave out "
                    f"optimizer.zero_grad(), since each step begins with new gradients, and "
                    f"change gradients in before_update="
                )
    finally:
        for (_, one), gradient in zip(learning, before, strict=True):
            one.grad = gradient


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
