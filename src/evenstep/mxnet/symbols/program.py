"""Programs: recorded operations as one function of tensors, which is queued as one task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from evenstep.errors import MXNetError
from evenstep.mxnet.core.operand import Operator, filled, operands
from evenstep.mxnet.symbols.symbol import Symbol, ordered


class Program:
    """The operations that compute some symbols, as one function of tensors.

    Args:
        variables: the symbols of the function's arguments, in their order.
        heads: the symbols of its results, as a tree of lists, tuples and dicts.

    Attributes:
        steps: the operations in order.
    """

    def __init__(self, variables: Sequence[Symbol], heads: Any) -> None:
        self.variables = list(variables)
        self.heads = heads
        listed = list(operands([heads]))
        known = set(self.variables)
        steps = ordered(listed)
        strange = [one for one in steps if one.op is None and one not in known]
        if strange:
            raise MXNetError(f"{strange[0]!r} is not among the inputs of the program")
        self.steps = [one for one in steps if one.op is not None]
        self.draws = any(one.op.draws for one in self.steps if one.op)
        self.has_modes = any(one.op.has_modes for one in self.steps if one.op)

    def mutated(self) -> list[int]:
        """Return which arguments the program changes during training."""
        found, places = set(), {variable: i for i, variable in enumerate(self.variables)}
        for step in self.steps:
            assert step.op is not None
            named = dict(zip(step.op.parameters, step.arguments, strict=False)) | step.options
            found |= {places[named[one]] for one in step.op.mutates}
        return sorted(found)

    def __call__(
        self,
        *tensors: torch.Tensor,
        training: bool = False,
        generator: torch.Generator | None = None,
    ) -> Any:
        """Return the results for some tensors."""
        values: dict[Any, Any] = dict(zip(self.variables, tensors, strict=True))
        several: dict[int, Any] = {}

        def value_of(symbol: Any) -> Any:
            return values[symbol]

        for step in self.steps:
            op = step.op
            assert op is not None
            if step.number is not None and id(step.arguments) in several:
                values[step] = several[id(step.arguments)][step.number]
                continue
            options = {name: filled(one, value_of) for name, one in step.options.items()}
            if op.has_modes:
                options["training"] = training
            if op.draws:
                options["generator"] = generator
            found = op.function(*filled(tuple(step.arguments), value_of), **options)
            if step.number is not None:
                several[id(step.arguments)] = found
                found = found[step.number]
            values[step] = found.reshape(1) if step.table == "nd" and not found.ndim else found
        return filled(self.heads, value_of)


class ProgramOperator(Operator):
    """A program as one operation.

    Args:
        name: its name in messages.
        program: the program.
        function: computes the program; None for the program itself.
    """

    def __init__(
        self, name: str, program: Program, function: Callable[..., Any] | None = None
    ) -> None:
        super().__init__(name, function or program)
        self.draws = program.draws
        self.has_modes = program.has_modes
        self.parameters = tuple(f"argument {i}" for i in range(len(program.variables)))
        self.mutates = tuple(self.parameters[i] for i in program.mutated())
