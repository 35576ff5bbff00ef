"""What arrays and symbols have in common: operators and methods, made from the tables."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from evenstep.errors import MXNetError
from evenstep.mxnet.ops import tables
from evenstep.mxnet.ops.names import missing


class Operator:
    """A function of a table, as users call it: with arrays or with symbols.

    Attributes:
        name: its name in messages.
        function: the function of torch tensors.
        draws: whether it takes a random generator.
        has_modes: whether it computes something else during training.
        mutates: the names of arguments that it changes during training.
        makes: whether it makes a tensor of numbers, on a device.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name = name
        self.function = function
        try:
            self.parameters = tuple(inspect.signature(function).parameters)
        except ValueError:  # of a function written in C
            self.parameters = ()
        self.draws = "generator" in self.parameters
        self.makes = "device" in self.parameters
        self.has_modes = "training" in self.parameters
        self.mutates = tuple(one for one in self.parameters if one.startswith("moving_"))
        self.__name__ = name
        self.__doc__ = function.__doc__

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Queue the operation and return its result's array at once; of symbols, a symbol."""
        for one in operands((*arguments, *options.values())):
            return one.invoke(self, arguments, options)
        raise MXNetError(
            f"{self.name} got no array among {', '.join(type(one).__name__ for one in arguments)}: "
            f"make arrays with nd.array or np.array first"
        )

    def __repr__(self) -> str:
        return f"<function {self.name}>"


def operands(arguments: Any) -> Iterator[Any]:
    """Return the arrays and symbols among arguments, also those in lists and tuples."""
    for argument in arguments:
        if isinstance(argument, Operand):
            yield argument
        elif type(argument) in (list, tuple):
            yield from operands(argument)


def filled(argument: Any, value_of: Callable[[Any], Any]) -> Any:
    """Return an argument with `value_of(operand)` for every array or symbol in it."""
    if isinstance(argument, Operand):
        return value_of(argument)
    if type(argument) in (list, tuple):
        return type(argument)(filled(one, value_of) for one in argument)
    return argument


@functools.cache
def operator(table: str, name: str) -> Operator:
    """Return the operator of a name in the table "nd", "np" or "npx".

    Raises:
        AttributeError: the table has no such name; the message says which names are close.
    """
    functions: Mapping[str, Callable[..., Any]] = getattr(tables, table.upper())
    if name not in functions:
        any_other = ", and mx.operation(torch.erfc) makes any function of torch one"
        raise AttributeError(missing(table, name, sorted(functions)) + any_other)
    return Operator(f"{table}.{name}", functions[name])


@functools.cache
def operation(function: Callable[..., Any]) -> Operator:
    """Return a function of torch tensors as an operation on arrays: `mx.operation(torch.erfc)(x)`.

    Its calls are queued, recorded and differentiated as those of the tables are. Its arguments are
    arrays and plain values; it returns a tensor, or a list or tuple of tensors, and changes none.
    """
    return Operator(getattr(function, "__name__", type(function).__name__), function)


class Operand:
    """An array or a symbol."""

    __slots__ = ()
    __array_priority__ = 1000.0  # numpy's arrays leave operators to these
    __hash__ = object.__hash__
    table: ClassVar[str] = "nd"
    spec: Any  # shape and dtype

    def invoke(self, op: Operator, arguments: Any, options: Any) -> Any:
        """Apply an operator to arguments among which it is."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Return a function of the table as a method: `x.sum(axis=0)`."""
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return functools.partial(operator(self.table, name), self)


def _binary(name: str, *, swapped: bool = False) -> Callable[[Any, Any], Any]:
    def method(self: Operand, other: Any) -> Any:
        op = operator(self.table, name)
        return self.invoke(op, (other, self) if swapped else (self, other), {})

    return method


def _unary(name: str) -> Callable[[Any], Any]:
    def method(self: Operand) -> Any:
        return self.invoke(operator(self.table, name), (self,), {})

    return method


_ARITHMETIC = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "divide",
    "floordiv": "floor_divide",
    "mod": "mod",
    "pow": "power",
    "matmul": "matmul",
}
_COMPARISONS = {
    "eq": "equal",
    "ne": "not_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "lt": "lesser",
    "le": "lesser_equal",
}
for _short, _name in _ARITHMETIC.items():
    setattr(Operand, f"__{_short}__", _binary(_name))
    setattr(Operand, f"__r{_short}__", _binary(_name, swapped=True))
for _short, _name in _COMPARISONS.items():
    setattr(Operand, f"__{_short}__", _binary(_name))
for _short, _name in {"neg": "negative", "abs": "abs"}.items():
    setattr(Operand, f"__{_short}__", _unary(_name))
