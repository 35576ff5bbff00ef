"""Records a block with symbols, and runs the recording as one operation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from evenstep.errors import MXNetError, SaveError
from evenstep.files import write_file
from evenstep.inference.export import export
from evenstep.mxnet.core import store
from evenstep.mxnet.core.array import NDArray
from evenstep.mxnet.core.invoke import submit
from evenstep.mxnet.core.operand import filled, operands
from evenstep.mxnet.core.types import Spec
from evenstep.mxnet.symbols import naming
from evenstep.mxnet.symbols.program import Program, ProgramOperator
from evenstep.mxnet.symbols.symbol import Symbol, described, ordered


class Recorded(NamedTuple):
    """A recorded call.

    Attributes:
        op: the program as an operation on the inputs and the parameters.
        program: the program.
        parameters: the parameters, in the order of the program's last arguments.
        heads: the symbols of the outputs, as the block returned them.
        specs: shapes and dtypes of the inputs.
    """

    op: ProgramOperator
    program: Program
    parameters: list[Any]
    heads: Any
    specs: tuple[Spec, ...]


class Programs:
    """The recorded programs of a hybridized block: one for each set of input shapes.

    Args:
        block: the block.
    """

    def __init__(self, block: Any) -> None:
        self._block = block
        self._recorded: dict[Any, Recorded] = {}
        self._last: Recorded | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Run the program for inputs of these shapes, which is recorded first if it is new."""
        arrays: list[Any] = list(operands(inputs))
        key = (tuple(one.spec for one in arrays), type(arrays[0]))
        if key not in self._recorded:
            self._recorded[key] = self._record(inputs, type(arrays[0]))
        recorded = self._last = self._recorded[key]
        context = arrays[0].context
        own = [one.data(context) for one in recorded.parameters]
        found = submit(recorded.op, (*arrays, *own), {}, like=type(arrays[0]), context=context)
        if isinstance(found, NDArray):
            return found if isinstance(recorded.heads, Symbol) else type(recorded.heads)([found])
        results = iter(found)
        return filled(recorded.heads, lambda symbol: next(results))

    def _record(self, inputs: Any, like: type[NDArray]) -> Recorded:
        """Call the block's Python code with symbols."""
        count = len(list(operands(inputs)))
        names = iter(["data"] if count == 1 else [f"data{i}" for i in range(count)])
        variables: list[Symbol] = []

        def symbol(array: NDArray) -> Symbol:
            variables.append(Symbol(next(names), spec=array.spec, table=like.table))
            return variables[-1]

        given = filled(tuple(inputs), symbol)
        with naming.entered(naming.Scope(self._block.prefix)):
            heads = self._block.forward(*given)
        listed: list[Any] = list(operands([heads]))
        if not listed:
            raise MXNetError(f"{self._block.name} returned {type(heads).__name__}: return symbols")
        own = [one for one in ordered(listed) if one.parameter is not None]
        program = Program([*variables, *own], heads if len(listed) == 1 else listed)
        op = ProgramOperator(self._block.name, program)
        specs = tuple(one.spec for one in variables if one.spec is not None)
        return Recorded(op, program, [one.parameter for one in own], heads, specs)

    def export(self, path: str, epoch: int = 0) -> tuple[str, str]:
        """Write the last program; see `HybridBlock.export`."""
        if self._last is None:
            raise MXNetError("export writes the program of a call: call net(x) with data first")
        last = self._last
        values = {one.name: one.list_data()[0] for one in last.parameters}
        json_file, params_file = Path(f"{path}-symbol.json"), Path(f"{path}-{epoch:04d}.params")
        store.write(params_file, values)
        text = {
            "format": "evenstep.mxnet",
            "program": f"{Path(path).name}.pt2",
            "nodes": described(list(operands([last.heads]))),
        }
        try:
            write_file(json_file, (json.dumps(text, indent=2) + "\n").encode())
        except OSError as error:
            raise SaveError(f"{json_file} can't be written ({error.strerror or error})") from error
        inputs = tuple(torch.zeros(spec.shape, dtype=spec.dtype) for spec in last.specs)
        own = [one.value() for one in values.values()]
        export(as_module(last.program, len(inputs), own), inputs, f"{path}.pt2")
        return str(json_file), str(params_file)


class _Inner(nn.Module):
    """A program with values for its last arguments, the parameters."""

    def __init__(self, program: Program, parameters: list[torch.Tensor]) -> None:
        super().__init__()
        self._program = program
        self.own = nn.ParameterList(
            nn.Parameter(one.detach().clone(), requires_grad=False) for one in parameters
        )

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self._program(*inputs, *self.own, training=False)


def as_module(program: Program, inputs: int, parameters: list[torch.Tensor]) -> nn.Module:
    """Return a program as a module of torch whose `forward` has a named argument for each input.

    Args:
        program: the program.
        inputs: the number of its inputs.
        parameters: the values of its last arguments, which are copied.
    """
    root, graph = nn.Module(), torch.fx.Graph()
    root.add_module("program", _Inner(program, parameters))
    names = [variable.name for variable in program.variables[:inputs]]
    graph.output(graph.call_module("program", tuple(map(graph.placeholder, names))))
    return torch.fx.GraphModule(root, graph).eval()
