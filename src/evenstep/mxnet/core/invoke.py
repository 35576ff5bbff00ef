"""One operation: its shapes are checked at once, then it is queued."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from evenstep.errors import MXNetError, hides_own_frames
from evenstep.mxnet.core import tape
from evenstep.mxnet.core.context import Context
from evenstep.mxnet.core.operand import Operand, Operator, filled, operands
from evenstep.mxnet.core.runtime import Chunk, place_here, runtime
from evenstep.mxnet.core.types import Spec
from evenstep.private_torch.dispatch import DataDependentOutput
from evenstep.private_torch.tensors import memory_of

_OF_VALUES = NotImplementedError, DataDependentOutput


class Base(Operand):
    """What operations know of an array.

    Attributes:
        chunk: the memory, shared with the arrays that this one is a part of.
        spec: shape and dtype.
        context: where it is.
        path: the steps from the chunk's tensor to its own part.
        is_detached: whether nothing is differentiated through it.
    """

    __slots__ = ("chunk", "context", "is_detached", "path", "spec")

    def __init__(
        self,
        chunk: Chunk,
        spec: Spec,
        context: Context,
        path: Sequence[Any] = (),
        is_detached: bool = False,
    ) -> None:
        self.chunk = chunk
        self.spec = spec
        self.context = context
        self.path = tuple(path)
        self.is_detached = is_detached
        if not self.path:
            chunk.spec = spec

    @property
    def is_tracked(self) -> bool:
        """Whether a backward pass may reach it."""
        return self.chunk.node is not None and not self.is_detached

    def value(self) -> torch.Tensor:
        """Return its tensor; called in tasks, or after waiting."""
        tensor: torch.Tensor = self.chunk.value_in_task()
        for step in self.path:
            tensor = step(tensor)
        return tensor

    def is_part(self, other: Base, step: Any) -> bool:
        """Return whether it is the part of `other` that a step leads to."""
        return self.chunk is other.chunk and self.path == (*other.path, step)


class _Number(NamedTuple):
    """A number in a key: 1, 1.0 and True are equal, but give other dtypes."""

    kind: type
    value: Any


class _Slice(NamedTuple):
    ends: tuple[Any, Any, Any]


def _key(argument: Any) -> Any:
    if isinstance(argument, Operand):
        return argument.spec
    kind = type(argument)
    if kind in (int, float, bool):
        return _Number(kind, argument)
    if kind is slice:
        return _Slice((argument.start, argument.stop, argument.step))
    if kind is list:
        return ("list", *map(_key, argument))
    if kind is tuple:
        return ("tuple", *map(_key, argument))
    return argument


def _from_key(key: Any) -> Any:
    if isinstance(key, Spec):
        return key.meta()
    if isinstance(key, _Number):
        return key.value
    if isinstance(key, _Slice):
        return slice(*key.ends)
    if type(key) is tuple and key and key[0] in ("list", "tuple"):
        return (list if key[0] == "list" else tuple)(map(_from_key, key[1:]))
    return key


def _computed(op: Operator, arguments: Any, options: Any) -> Any:
    """Return the specs of the results, computed with tensors that have no memory."""
    with torch.no_grad():
        found = op.function(*map(_from_key, arguments), **{k: _from_key(v) for k, v in options})
    if isinstance(found, torch.Tensor):
        return Spec.of(found)
    return tuple(map(Spec.of, found))


_computed_before = functools.lru_cache(maxsize=4096)(_computed)


def spec_of(op: Operator, arguments: Sequence[Any], options: Any = ()) -> Any:
    """Return the spec of an operation's result, or of each result; None if it depends on values.

    Raises:
        MXNetError: the arguments don't fit each other.
    """
    key = (
        tuple(map(_key, arguments)),
        tuple((name, _key(one)) for name, one in dict(options).items()),
    )
    try:
        try:
            return _computed_before(op, *key)
        except TypeError as error:
            if "unhashable" not in str(error):
                raise
            return _computed(op, *key)
    except _OF_VALUES:
        return None
    except Exception as error:
        given = [*arguments, *dict(options).values()]
        shapes = " and ".join(str(one.spec.shape) for one in operands(given))
        raise MXNetError(f"{op.name} of arrays of shapes {shapes}: {error}") from None


@hides_own_frames
def submit(
    op: Operator,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    *,
    like: Any,
    context: Context,
    copies: bool = False,
) -> Any:
    """Queue an operation; return the arrays of its results at once.

    Args:
        op: the operation.
        arguments: its arguments, with arrays among them.
        options: its further arguments by name.
        like: the class of the results, NDArray or ndarray.
        context: where to compute.
        copies: use the copying lane; the arguments may be in other contexts.

    Raises:
        MXNetError: shapes don't fit, or arrays are in different contexts.
    """
    out = options.pop("out", None) if options else None
    for name in ("name", "ctx"):
        options.pop(name, None)
    used: list[Any] = list(operands((*arguments, *options.values())))
    if not copies:
        _check_contexts(op, used, context)
    now = tape.modes()
    writes: list[Chunk] = []
    if op.has_modes:
        options["training"] = now.training
    expected = spec_of(op, arguments, options.items())
    if op.has_modes and now.training:
        writes += [one.chunk for one in _mutated(op, arguments, options)]
    recording = now.recording and any(one.is_tracked for one in used)
    results = _results(op, expected, like, context)
    chunks = [one.chunk for one in results]
    if recording:
        _record(used, results)
    call = _Call(op, arguments, options, chunks, context, recording, like.table == "nd")
    if op.draws:
        writes.append(runtime().generator(context.device))
    run(op.name, context, call, used, (), [*chunks, *writes], copies=copies)
    if expected is None:
        results[0].chunk.wait_to_read()
        results[0].spec = Spec.of(results[0].value())
    if out is not None:
        out[:] = results[0]
        return out
    return results[0] if not isinstance(expected, tuple) or isinstance(expected, Spec) else results


def run(
    name: str,
    context: Context,
    call: Callable[[], object],
    arrays: Iterable[Any] = (),
    reads: Sequence[Chunk] = (),
    writes: Sequence[Any] = (),
    *,
    copies: bool = False,
) -> None:
    """Queue a call that reads arrays and chunks, and writes chunks (or arrays' chunks)."""
    place = place_here()

    def call_and_name() -> None:
        try:
            call()
        except Exception as error:
            raise MXNetError(f"{name}, queued at {place}, failed: {error}") from error

    runtime().submit(
        call_and_name,
        context.device,
        name=name,
        reads=[*(one.chunk for one in arrays if isinstance(one, Base)), *reads],
        writes=[one.chunk if isinstance(one, Base) else one for one in writes],
        copies=copies,
        place=place,
    )


def own(chunk: Chunk, context: Context, wanted: bool) -> None:
    """Queue that a chunk's tensor becomes a leaf of torch's graph, or is taken out of it."""
    run(
        "attach_grad",
        context,
        lambda: chunk.put(chunk.value_in_task().detach().requires_grad_(wanted)),
        writes=[chunk],
    )


class _Call:
    """An operation as a lane makes it."""

    __slots__ = ("arguments", "chunks", "context", "is_classic", "op", "options", "recording")

    def __init__(
        self,
        op: Operator,
        arguments: Any,
        options: dict[str, Any],
        chunks: Sequence[Chunk],
        context: Context,
        recording: bool,
        is_classic: bool,
    ) -> None:
        self.op = op
        self.arguments = arguments
        self.options = options
        self.chunks = chunks
        self.context = context
        self.recording = recording
        self.is_classic = is_classic

    def __call__(self) -> None:
        values: dict[int, torch.Tensor] = {}

        def value_of(array: Base) -> torch.Tensor:
            found = values[id(array)] = array.value()
            if found.device != where:
                found = found.to(where)
            return found

        op, where = self.op, self.context.device.torch_device
        with torch.set_grad_enabled(self.recording):
            arguments = filled(self.arguments, value_of)
            options = {name: filled(one, value_of) for name, one in self.options.items()}
            if op.draws:
                options["generator"] = runtime().generator(self.context.device).value_in_task()
            if op.makes:
                options["device"] = where
            found = op.function(*arguments, **options)
            taken = {memory_of(one) for one in values.values()}
            results = [found] if isinstance(found, torch.Tensor) else found
            for chunk, result in zip(self.chunks, results, strict=True):
                if self.is_classic and not result.ndim:
                    result = result.reshape(1)
                if memory_of(result) in taken:  # every chunk has memory of its own
                    result = result.clone()
                chunk.put(result)


def _results(op: Operator, expected: Any, like: Any, context: Context) -> list[Any]:
    if expected is None:
        expected = Spec((), torch.float32)
    specs = [expected] if isinstance(expected, Spec) else expected
    if like.table == "nd":
        specs = [one if one.shape else one._replace(shape=(1,)) for one in specs]
    return [like(Chunk(op.name), spec, context) for spec in specs]


def _record(used: Sequence[Any], results: Sequence[Any]) -> None:
    inputs = tuple(dict.fromkeys(one.chunk.node for one in used if one.is_tracked))
    for result in results:
        if result.spec.dtype.is_floating_point:
            result.chunk.node = tape.Node(result.chunk, inputs)


def _mutated(op: Operator, arguments: Sequence[Any], options: dict[str, Any]) -> list[Base]:
    named = dict(zip(op.parameters, arguments, strict=False)) | options
    return [named[name] for name in op.mutates if isinstance(named.get(name), Base)]


def _check_contexts(op: Operator, used: Sequence[Base], context: Context) -> None:
    for one in used:
        if one.context != context:
            raise MXNetError(
                f"{op.name} got arrays in {context} and in {one.context}: copy one of them with "
                f"as_in_context({context})"
            )
