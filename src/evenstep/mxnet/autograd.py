"""Automatic differentiation: `record`, `backward`, and the modes of training and prediction."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from evenstep.mxnet.core import differentiate, tape
from evenstep.mxnet.core.array import NDArray

__all__ = [
    "backward",
    "grad",
    "is_recording",
    "is_training",
    "mark_variables",
    "pause",
    "predict_mode",
    "record",
    "train_mode",
]


def record(train_mode: bool = True) -> AbstractContextManager[None]:
    """Record operations for `backward` inside the `with` block, in the mode of training."""
    return tape.changed_modes(recording=True, training=train_mode)


def pause(train_mode: bool = False) -> AbstractContextManager[None]:
    """Record nothing inside the `with` block."""
    return tape.changed_modes(recording=False, training=train_mode)


def train_mode() -> AbstractContextManager[None]:
    """Let layers behave as in training inside the `with` block, without recording more."""
    return tape.changed_modes(training=True)


def predict_mode() -> AbstractContextManager[None]:
    """Let layers behave as in prediction inside the `with` block."""
    return tape.changed_modes(training=False)


def is_recording() -> bool:
    """Return whether operations are recorded."""
    return tape.modes().recording


def is_training() -> bool:
    """Return whether layers behave as in training."""
    return tape.modes().training


def mark_variables(
    variables: Sequence[NDArray], gradients: Sequence[NDArray], grad_reqs: str = "write"
) -> None:
    """Make arrays leaves of the graph, with these arrays for their gradients."""
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.attach_grad(grad_reqs)
        variable.chunk.node.gradient = gradient


def backward(
    heads: NDArray | Sequence[NDArray],
    head_grads: Any = None,
    retain_graph: bool = False,
    train_mode: bool = True,
) -> None:
    """Queue the backward pass: the gradients of all leaves that the heads were computed from.

    Args:
        heads: recorded arrays; those in different contexts are differentiated side by side.
        head_grads: the gradient of each head; None stands for ones.
        retain_graph: allow another backward pass from them.
        train_mode: not used: what was recorded decides.

    Raises:
        MXNetError: a head was not recorded, or an earlier backward pass has used its graph.
    """
    if isinstance(heads, NDArray):
        heads, head_grads = [heads], None if head_grads is None else [head_grads]
    differentiate.backward(heads, head_grads, retain_graph)


def grad(
    heads: NDArray | Sequence[NDArray],
    variables: NDArray | Sequence[NDArray],
    head_grads: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    train_mode: bool = True,
) -> Any:
    """Return the gradients of `variables` as new arrays; their own `grad` stays as it is.

    With `create_graph` the gradients are recorded too, for a derivative of higher order.
    """
    single = isinstance(variables, NDArray)
    listed = [variables] if single else list(variables)
    found = differentiate.gradients(
        [heads] if isinstance(heads, NDArray) else list(heads),
        listed,
        head_grads if head_grads is None or not isinstance(head_grads, NDArray) else [head_grads],
        retain_graph=create_graph if retain_graph is None else retain_graph,
        create_graph=create_graph,
    )
    return found[0] if single else found
