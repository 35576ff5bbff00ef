"""Blocks: layers and networks. A `HybridBlock` can be recorded as one program."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from evenstep.errors import DeferredInitializationError, MXNetError, hides_own_frames
from evenstep.inference.export import load_exported
from evenstep.mxnet import nd, sym
from evenstep.mxnet.core import store
from evenstep.mxnet.core.array import NDArray, from_values
from evenstep.mxnet.core.context import Context
from evenstep.mxnet.core.operand import operands
from evenstep.mxnet.gluon.hybrid import Programs
from evenstep.mxnet.gluon.parameter import Init, Parameter, ParameterDict
from evenstep.mxnet.symbols import naming
from evenstep.mxnet.symbols.symbol import Symbol


class Block:
    """A layer or a network: parameters, children, and a `forward` method.

    Args:
        prefix: beginning of the names of its parameters; None to number it by its class.
        params: parameters to share with another block.
    """

    _scope: naming.Scope
    _params: ParameterDict
    _children: dict[str, Block]
    _reg_params: dict[str, Parameter]

    def __init__(self, prefix: str | None = None, params: ParameterDict | None = None) -> None:
        scope = naming.scope()
        hint = type(self).__name__.lower()
        whole = f"{scope.numbered(hint)}_" if prefix is None else scope.prefix + prefix
        object.__setattr__(self, "_scope", naming.Scope(whole))
        object.__setattr__(self, "_children", {})
        object.__setattr__(self, "_reg_params", {})
        shared = params if params is not None else ParameterDict(whole)
        object.__setattr__(self, "_params", shared)
        self._hooks: list[Callable[..., Any]] = []

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; blocks become children, and parameters the block's own."""
        if isinstance(value, Block):
            self.register_child(value, name)
        elif isinstance(value, Parameter):
            self._reg_params[name] = value
        object.__setattr__(self, name, value)

    @property
    def prefix(self) -> str:
        """The beginning of the names of its parameters."""
        return self._scope.prefix

    @property
    def name(self) -> str:
        """Its name."""
        return self.prefix.removesuffix("_")

    @property
    def params(self) -> ParameterDict:
        """Its own parameters, without those of its children."""
        return self._params

    def name_scope(self) -> AbstractContextManager[None]:
        """Let blocks that are made in the `with` block have names after its own."""
        return naming.entered(self._scope)

    def register_child(self, block: Block, name: str | None = None) -> None:
        """Add a child."""
        self._children[str(len(self._children)) if name is None else name] = block

    def register_forward_hook(self, hook: Callable[..., Any]) -> None:
        """Call `hook(block, inputs, output)` after each forward pass."""
        self._hooks.append(hook)

    def apply(self, function: Callable[[Block], object]) -> Block:
        """Call a function with every block inside, and with this one."""
        for child in self._children.values():
            child.apply(function)
        function(self)
        return self

    def collect_params(self, select: str | None = None) -> ParameterDict:
        """Return the parameters of the block and of all blocks inside, by name.

        Args:
            select: a regular expression that the names must match.
        """
        found = ParameterDict(self.params.prefix, self.params)
        found.update({one.name: one for one in self._reg_params.values()})
        for child in self._children.values():
            found.update(child.collect_params())
        return found if select is None else found.select(select)

    def initialize(
        self,
        init: Init = None,
        ctx: Context | Sequence[Context] | None = None,
        verbose: bool = False,
        force_reinit: bool = False,
        device: Context | Sequence[Context] | None = None,
    ) -> None:
        """Make the first values of all parameters, the same on every context.

        Args:
            init: the initializer of weights; None for Uniform(0.07).
            ctx: one or several contexts; None for the current one.
            verbose: not used.
            force_reinit: replace values that are there already.
            device: another name of `ctx`.
        """
        self.collect_params().initialize(
            init, ctx if ctx is not None else device, verbose, force_reinit
        )

    def hybridize(self, active: bool = True, **options: Any) -> None:
        """Let all hybrid blocks inside run as programs; see `HybridBlock.hybridize`."""
        for child in self._children.values():
            child.hybridize(active, **options)

    def cast(self, dtype: Any) -> None:
        """Change the dtype of all parameters."""
        for parameter in self.collect_params().values():
            parameter.cast(dtype)

    def zero_grad(self) -> None:
        """Set the gradients of all parameters to 0."""
        self.collect_params().zero_grad()

    def save_parameters(self, filename: str) -> None:
        """Save the values of all parameters, by their places in the network (safetensors).

        Raises:
            SaveError: the file can't be written.
        """
        store.write(Path(filename), {k: p.list_data()[0] for k, p in self._structured().items()})

    def load_parameters(
        self,
        filename: str,
        ctx: Context | Sequence[Context] | None = None,
        allow_missing: bool = False,
        ignore_extra: bool = False,
    ) -> None:
        """Load the values of all parameters.

        Args:
            filename: a file that `save_parameters` has written.
            ctx: contexts for parameters that are not initialized yet.
            allow_missing: leave parameters as they are that the file doesn't have.
            ignore_extra: accept values of no parameter.

        Raises:
            MXNetError: the file can't be read, or its names are others than the network's.
        """
        found, mine = store.read(filename), self._structured()
        missing, extra = sorted(mine.keys() - found.keys()), sorted(found.keys() - mine.keys())
        if (missing and not allow_missing) or (extra and not ignore_extra):
            raise MXNetError(
                f"{filename} has no values for {missing or 'nothing'}, and {extra or 'nothing'} "
                f"that the network doesn't have: build the same network, or give "
                f"allow_missing=True or ignore_extra=True"
            )
        for name in mine.keys() & found.keys():
            mine[name].load(found[name], ctx)

    save_params, load_params = save_parameters, load_parameters

    def _structured(self, before: str = "") -> dict[str, Parameter]:
        """Return the parameters by their places, such as "0.weight"."""
        found = {before + name: one for name, one in self._reg_params.items()}
        known = set(self._reg_params.values())
        found |= {before + k: one for k, one in self.params.items() if one not in known}
        for name, child in self._children.items():
            found |= child._structured(f"{before}{name}.")
        return found

    def forward(self, *inputs: Any) -> Any:
        """Compute the outputs; a subclass defines it."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward method")

    @hides_own_frames
    def __call__(self, *inputs: Any) -> Any:
        """Return the outputs of `forward`."""
        output = self.forward(*inputs)
        for hook in self._hooks:
            hook(self, inputs, output)
        return output

    def __repr__(self) -> str:
        lines = [
            f"  ({name}): " + repr(child).replace("\n", "\n  ")
            for name, child in self._children.items()
        ]
        return f"{type(self).__name__}(\n" + "".join(f"{line}\n" for line in lines) + ")"


class HybridBlock(Block):
    """A block that computes with the functions of `F`, on arrays or on symbols.

    A subclass defines `hybrid_forward(F, x, ..., **parameters)`, or `forward(x, ...)`. After
    `hybridize`, its first call records the operations with symbols, and later calls with inputs of
    the same shapes run the recorded program as one task, without calling its Python code again.
    """

    def __init__(self, prefix: str | None = None, params: ParameterDict | None = None) -> None:
        super().__init__(prefix, params)
        self._programs: Programs | None = None

    def hybridize(
        self,
        active: bool = True,
        static_alloc: bool = False,
        static_shape: bool = False,
        **flags: Any,
    ) -> None:
        """Record the block as one program in its next call.

        Args:
            active: False to call its Python code again.
            static_alloc: not used: torch decides on memory.
            static_shape: not used: a program is always for the shapes of its recorded call.
            **flags: not used.
        """
        self._programs = Programs(self) if active else None
        super().hybridize(active, static_alloc=static_alloc, static_shape=static_shape, **flags)

    @hides_own_frames
    def __call__(self, *inputs: Any) -> Any:
        """Return the outputs of `forward`, or of the recorded program."""
        arrays = [one for one in operands(inputs) if isinstance(one, NDArray)]
        if self._programs is None or not arrays:
            with naming.entered(naming.Scope(self.prefix)):
                return super().__call__(*inputs)
        return self._programs(*inputs)

    def forward(self, x: Any, *others: Any) -> Any:
        """Call `hybrid_forward` with the parameters on the context of `x`."""
        is_symbol = isinstance(x, Symbol)
        try:
            own = self._own(x)
        except DeferredInitializationError:
            self.infer_shape(x, *others)
            for parameter in self._reg_params.values():
                parameter.finish(NDArray)
            own = self._own(x)
        return self.hybrid_forward(sym if is_symbol else nd, x, *others, **own)

    def hybrid_forward(self, F: Any, x: Any, *others: Any, **parameters: Any) -> Any:
        """Compute the outputs with the functions of `F`; a subclass defines it."""
        raise NotImplementedError(
            f"{type(self).__name__} defines no hybrid_forward or forward method"
        )

    def infer_shape(self, *inputs: Any) -> None:
        """Set the shapes of the block's own parameters from its inputs; layers define it.

        Raises:
            DeferredInitializationError: the block can't do that.
        """
        unknown = [one.name for one in self._reg_params.values() if not one.is_known]
        raise DeferredInitializationError(
            f"the shapes of {', '.join(unknown)} are not known: give them to params.get(..., "
            f"shape=...), or define infer_shape(self, *inputs)"
        )

    def export(self, path: str, epoch: int = 0, **options: Any) -> tuple[str, str]:
        """Write the program of the last call after `hybridize`, and its parameters.

        Writes `path-symbol.json` (the operations, for reading), `path-0000.params` (the parameters,
        safetensors), and `path.pt2`: program and parameters in one file that runs without this
        Python code, see `evenstep.load_exported`. MXNet itself can't read them.

        Raises:
            MXNetError: the block was not hybridized and called.
            ExportError: torch can't export it.
        """
        if self._programs is None:
            raise MXNetError(
                "export writes the program of a call: call hybridize() and net(x) first"
            )
        return self._programs.export(path, epoch)

    def _own(self, x: Any) -> dict[str, Any]:
        if isinstance(x, Symbol):
            if x.spec is not None:
                for one in self._reg_params.values():
                    one.list_data()  # raises if it is deferred
            return {name: one.var() for name, one in self._reg_params.items()}
        return {name: one.data(x.context) for name, one in self._reg_params.items()}


class SymbolBlock(Block):
    """A block that runs a program which `HybridBlock.export` has written, without its Python code.

    It predicts: a call waits for its inputs, and is not recorded.

    net = gluon.SymbolBlock.imports("my_mlp-symbol.json", ["data"], "my_mlp-0000.params")
    """

    def __init__(self, program: Callable[..., Any]) -> None:
        super().__init__()
        self._program = program

    @classmethod
    def imports(
        cls,
        symbol_file: str,
        input_names: str | Sequence[str],
        param_file: str | None = None,
        ctx: Context | None = None,
    ) -> SymbolBlock:
        """Return the block of exported files.

        Args:
            symbol_file: `path-symbol.json`; the program is in `path.pt2` beside it.
            input_names: not used: inputs are told apart by their order.
            param_file: not used: `path.pt2` has the parameters.
            ctx: not used: the block computes where its inputs are.

        Raises:
            MXNetError: the file is not one that `export` has written.
        """
        file = Path(symbol_file)
        try:
            program = json.loads(file.read_text(encoding="utf-8"))["program"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MXNetError(
                f"{symbol_file} is not a file that HybridBlock.export of evenstep has written "
                f"({type(error).__name__})"
            ) from None
        return cls(load_exported(file.with_name(Path(program).name)))

    def forward(self, *inputs: Any) -> Any:
        """Run the program on arrays; it returns one."""
        with torch.no_grad():
            found = self._program(*(torch.from_numpy(one.asnumpy()) for one in inputs))
        return from_values(found, inputs[0].context, None, type(inputs[0]))
