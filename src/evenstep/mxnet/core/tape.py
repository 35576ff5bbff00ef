"""What is recorded for `backward`, and the backward pass as one queued task.

Torch records the operations themselves, in the lanes. The tape holds what the engine needs to know:
which chunks a backward pass reads, and which gradients it writes.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from evenstep.errors import MXNetError
from evenstep.mxnet.core.runtime import Chunk


class Modes(NamedTuple):
    """The modes of the calling code.

    Attributes:
        recording: whether operations are recorded for `backward`.
        training: whether layers such as dropout behave as in training.
    """

    recording: bool = False
    training: bool = False


_MODES: contextvars.ContextVar[Modes] = contextvars.ContextVar("modes", default=Modes())  # noqa: B039


def modes() -> Modes:
    """Return the modes of the calling code."""
    return _MODES.get()


@contextmanager
def changed_modes(recording: bool | None = None, training: bool | None = None) -> Iterator[None]:
    """Set modes inside the `with` block; None leaves a mode as it is."""
    before = _MODES.get()
    token = _MODES.set(
        Modes(
            before.recording if recording is None else recording,
            before.training if training is None else training,
        )
    )
    try:
        yield
    finally:
        _MODES.reset(token)


class Node:
    """A chunk that a backward pass may reach.

    Attributes:
        inputs: the nodes that it was computed from; none for a leaf.
        gradient: the array of a leaf's gradient.
        request: "write" or "add" for a leaf: what a backward pass does with `gradient`.
        is_spent: whether a backward pass has used it up.
        is_fresh: whether a backward pass has reached a leaf since its last update.
    """

    __slots__ = ("_chunk", "gradient", "inputs", "is_fresh", "is_spent", "request")

    def __init__(
        self, chunk: Chunk, inputs: Sequence[Node] = (), gradient: Any = None, request: str = "null"
    ) -> None:
        self._chunk = weakref.ref(chunk)
        self.inputs = inputs
        self.gradient = gradient
        self.request = request
        self.is_spent = False
        self.is_fresh = False

    @property
    def chunk(self) -> Chunk | None:
        """Its chunk, unless no array uses it any more, so that nothing can change it."""
        return self._chunk()


def reached(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes and all that they were computed from."""
    found: dict[Node, None] = {}
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting += node.inputs
    return list(found)


def chunks_of(nodes: Iterable[Node]) -> list[Chunk]:
    """Return the chunks of nodes that still have one.

    Each is asked for once: a lane may free the last array of a chunk at any moment.
    """
    return [chunk for node in nodes if (chunk := node.chunk) is not None]


def spend(nodes: Sequence[Node]) -> None:
    """Mark recorded nodes as used by a backward pass, which frees what torch has saved for it.

    Raises:
        MXNetError: a backward pass has used one of them already.
    """
    inner = [node for node in nodes if node.request == "null"]
    if any(node.is_spent for node in inner):
        raise MXNetError(
            "a part of this graph was used by an earlier backward: call backward once, or "
            "autograd.backward([l1, l2]) for several losses, or give retain_graph=True before"
        )
    for node in inner:
        node.is_spent = True
        node.inputs = ()


def accumulate(
    heads: Sequence[torch.Tensor],
    head_gradients: Sequence[torch.Tensor | None],
    leaves: Sequence[tuple[Chunk, Chunk, str]],
    *,
    retain_graph: bool,
) -> None:
    """Run torch's backward pass, in a lane, and put the gradients into their chunks.

    Args:
        heads: the tensors to differentiate.
        head_gradients: the gradient of each; None stands for ones.
        leaves: for each leaf its chunk, the chunk of its gradient, and "write" or "add".
        retain_graph: keep what torch has saved, for another backward pass.
    """
    tensors = [chunk.value_in_task() for chunk, _, _ in leaves]
    for tensor, (_, gradient, request) in zip(tensors, leaves, strict=True):
        tensor.grad = gradient.value_in_task() if request == "add" else None
    try:
        torch.autograd.backward(
            heads,
            [
                torch.ones_like(head) if given is None else given
                for head, given in zip(heads, head_gradients, strict=True)
            ],
            retain_graph=retain_graph,
            inputs=tensors,
        )
        for tensor, (_, gradient, _) in zip(tensors, leaves, strict=True):
            gradient.put(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
    finally:
        for tensor in tensors:
            tensor.grad = None
