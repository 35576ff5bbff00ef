"""Symbols: what a network computes, recorded without computing it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evenstep.errors import MXNetError
from evenstep.mxnet.core.invoke import Base, spec_of
from evenstep.mxnet.core.operand import Operand, Operator, operands
from evenstep.mxnet.core.types import Spec, numpy_dtype
from evenstep.mxnet.symbols import naming


class Symbol(Operand):
    """A variable, or the result of an operation on symbols.

    Attributes:
        name: its name.
        op: the operation; None for a variable.
        arguments, options: the arguments of the operation.
        spec: shape and dtype; None if they are not known.
        number: which of several results it is.
        parameter: the parameter that a variable stands for.
    """

    __slots__ = ("arguments", "name", "number", "op", "options", "parameter", "spec", "table_name")

    def __init__(
        self,
        name: str,
        op: Operator | None = None,
        arguments: Any = (),
        options: Mapping[str, Any] | None = None,
        *,
        spec: Spec | None = None,
        number: int | None = None,
        parameter: Any = None,
        table: str = "nd",
    ) -> None:
        self.name = name
        self.op = op
        self.arguments = arguments
        self.options = dict(options or {})
        self.spec = spec
        self.number = number
        self.parameter = parameter
        self.table_name = table

    @property
    def table(self) -> str:  # type: ignore[override]
        """The table of its methods: that of the arrays that it stands for."""
        return self.table_name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape.

        Raises:
            MXNetError: it is not known, because the input's shape was not given.
        """
        return self._known.shape

    @property
    def dtype(self) -> Any:
        """The dtype, as numpy's type."""
        return numpy_dtype(self._known.dtype)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def _known(self) -> Spec:
        if self.spec is None:
            raise MXNetError(f"the shape of {self!r} is not known: give sym.var(name, shape=...)")
        known: Spec = self.spec
        return known

    def invoke(self, op: Operator, arguments: Any, options: Any) -> Any:
        """Record an operation, and return the symbol of its result, or of each result."""
        options = dict(options)
        name = options.pop("name", None)
        scope = naming.scope()
        hint = op.name.split(".")[-1].lower()
        name = scope.prefix + name if name else scope.numbered(hint)
        arrays = [one for one in operands((*arguments, *options.values())) if isinstance(one, Base)]
        if arrays:
            raise MXNetError(
                f"{op.name} got an array of shape {arrays[0].spec.shape} beside symbols: in a "
                f"hybridized block, compute with the block's inputs and parameters only"
            )
        spec = _spec_of(op, arguments, options)
        if isinstance(spec, Spec) or spec is None:
            spec = spec if spec is None else self._classic(spec)
            return Symbol(name, op, arguments, options, spec=spec, table=self.table)
        return [
            Symbol(
                f"{name}_{i}",
                op,
                arguments,
                options,
                spec=self._classic(one),
                number=i,
                table=self.table,
            )
            for i, one in enumerate(spec)
        ]

    def _classic(self, spec: Spec) -> Spec:
        return spec._replace(shape=(1,)) if self.table == "nd" and not spec.shape else spec

    def reshape(self, *shape: Any) -> Any:
        """Record a reshape."""
        given = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return self.invoke(_RESHAPE, (self, tuple(given)), {})

    def __getitem__(self, key: Any) -> Any:
        return self.invoke(_SELECT, (self, key), {})

    def __iadd__(self, other: Any) -> Any:
        raise _in_place("+=")

    def __isub__(self, other: Any) -> Any:
        raise _in_place("-=")

    def __imul__(self, other: Any) -> Any:
        raise _in_place("*=")

    def __itruediv__(self, other: Any) -> Any:
        raise _in_place("/=")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise _in_place("x[...] = y")

    def __bool__(self) -> bool:
        raise MXNetError(
            f"{self!r} has no value: a hybridized block may not branch on values; call hybridize "
            f"only where it doesn't"
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("asnumpy", "asscalar", "wait_to_read", "item", "tolist", "context", "ctx"):
            raise MXNetError(
                f"{self!r} has no {name}: a hybridized block is recorded with symbols, which have "
                f"no values; don't hybridize it, or leave {name} out"
            )
        return super().__getattr__(name)

    def __repr__(self) -> str:
        return f"<Symbol {self.name}>"

    def list_arguments(self) -> list[str]:
        """Return the names of the variables that it is computed from."""
        return [one.name for one in ordered([self]) if one.op is None]

    def tojson(self) -> str:
        """Return the operations that compute it as JSON, for reading."""
        return json.dumps({"nodes": described([self])}, indent=2)


def _in_place(what: str) -> MXNetError:
    return MXNetError(f"{what} changes a symbol in place: in a hybridized block, write `x = x + y`")


def _reshape(data: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return data.reshape(
        [data.shape[i] if size == 0 and i < data.ndim else size for i, size in enumerate(shape)]
    )


_RESHAPE = Operator("nd.reshape", _reshape)
_SELECT = Operator("nd.x[...]", lambda data, key: data[key])


def _spec_of(op: Operator, arguments: Any, options: Mapping[str, Any]) -> Any:
    """Return the specs of an operation's results; None if an input's is not known."""
    if any(one.spec is None for one in operands((*arguments, *options.values()))):
        return None
    return spec_of(op, arguments, options.items())


def ordered(heads: Sequence[Symbol]) -> list[Symbol]:
    """Return all symbols that the heads are computed from, each after its inputs."""
    found: dict[Symbol, None] = {}
    waiting: list[tuple[Symbol, bool]] = [(head, False) for head in reversed(heads)]
    while waiting:
        symbol, is_done = waiting.pop()
        if symbol in found:
            continue
        if is_done:
            found[symbol] = None
            continue
        waiting.append((symbol, True))
        inputs: list[Any] = list(operands((*symbol.arguments, *symbol.options.values())))
        waiting += [(one, False) for one in reversed(inputs)]
    return list(found)


def described(heads: Sequence[Symbol]) -> list[dict[str, Any]]:
    """Return name, operation and inputs of every symbol, as plain values."""
    nodes = []
    for symbol in ordered(heads):
        inputs: list[Any] = list(operands((*symbol.arguments, *symbol.options.values())))
        options = {name: repr(one) for name, one in symbol.options.items() if _is_plain(one)}
        nodes.append(
            {
                "op": "null" if symbol.op is None else symbol.op.name.split(".")[-1],
                "name": symbol.name,
                "attrs": options,
                "inputs": [one.name for one in inputs],
            }
        )
    return nodes


def _is_plain(value: Any) -> bool:
    return not isinstance(value, Operand) and value is not None
