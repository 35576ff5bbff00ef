"""Parameters: arrays on one or several contexts, with their gradients."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from evenstep.errors import DeferredInitializationError, MXNetError
from evenstep.mxnet import init as initializers
from evenstep.mxnet.core.array import NDArray
from evenstep.mxnet.core.context import Context, current_context
from evenstep.mxnet.core.types import Spec, numpy_dtype, torch_dtype
from evenstep.mxnet.symbols.symbol import Symbol

Init = initializers.Initializer | str | None


class Parameter:
    """A parameter of a block, with a copy on each of its contexts.

    Args:
        name: its name.
        grad_req: "write", "add" or "null"; see `NDArray.attach_grad`.
        shape: the shape; sizes of 0 or -1 are found in the first forward pass.
        dtype: the dtype.
        lr_mult: factor of the learning rate.
        wd_mult: factor of the weight decay.
        init: its own initializer; None for that of `initialize`.
        allow_deferred_init: not used: sizes that are not known are always found later.
        differentiable: whether it has a gradient at all.
    """

    def __init__(
        self,
        name: str = "parameter",
        grad_req: str = "write",
        shape: int | Sequence[int] | None = None,
        dtype: Any = "float32",
        lr_mult: float = 1.0,
        wd_mult: float = 1.0,
        init: Init = None,
        allow_deferred_init: bool = True,
        differentiable: bool = True,
    ) -> None:
        self.name = name
        self.lr_mult = lr_mult
        self.wd_mult = wd_mult
        self.init = init
        self.dtype = numpy_dtype(torch_dtype(dtype))
        self._grad_req = grad_req if differentiable else "null"
        self._shape = (
            (shape,) if isinstance(shape, int) else shape if shape is None else tuple(shape)
        )
        self._data: dict[Context, Any] = {}
        self._deferred: tuple[initializers.Initializer, list[Context], type[NDArray]] | None = None

    # ---- facts

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape; None or sizes of 0 or -1 are not known yet."""
        return self._shape

    @shape.setter
    def shape(self, shape: Sequence[int]) -> None:
        known = self._shape or (0,) * len(shape)
        fits = len(known) == len(shape) and all(
            one in (0, -1, other) for one, other in zip(known, shape, strict=True)
        )
        if not fits:
            raise MXNetError(f"{self.name} has the shape {known}, and can't get {tuple(shape)}")
        self._shape = tuple(shape)

    @property
    def is_known(self) -> bool:
        """Whether the whole shape is known."""
        return self._shape is not None and all(size > 0 for size in self._shape)

    @property
    def grad_req(self) -> str:
        """What a backward pass does with the gradient: "write", "add", or "null" for nothing."""
        return self._grad_req

    @grad_req.setter
    def grad_req(self, grad_req: str) -> None:
        self._grad_req = grad_req
        for array in self._data.values():
            array.attach_grad(grad_req)

    def __repr__(self) -> str:
        return f"Parameter {self.name} (shape={self._shape}, dtype={self.dtype.__name__})"

    # ---- first values

    def initialize(
        self,
        init: Init = None,
        ctx: Context | Sequence[Context] | None = None,
        default_init: Init = None,
        force_reinit: bool = False,
    ) -> None:
        """Make the first values, the same on every context; later, if the shape is not known.

        Args:
            init: the initializer; None for the parameter's own, or else `default_init`.
            ctx: one or several contexts; None for the current one.
            default_init: used if there is no other.
            force_reinit: replace values that are there already.
        """
        if self._data and not force_reinit:
            return
        contexts = [ctx or current_context()] if ctx is None or isinstance(ctx, Context) else [*ctx]
        own = init or self.init
        maker = initializers.create(own or default_init)
        if own is not None:
            maker = _Exactly(maker)
        self._data.clear()
        self._deferred = (maker, contexts, NDArray)
        if self.is_known:
            self.finish(NDArray)

    def finish(self, like: type[NDArray]) -> None:
        """Make the first values, now that the shape is known."""
        if self._deferred is None:
            return
        maker, contexts, _ = self._deferred
        self._deferred = None
        assert self._shape is not None
        self._place(maker.make(self.name, self._shape, self.dtype), contexts)

    def _place(self, values: Any, contexts: Iterable[Context]) -> None:
        self._data = {context: values.copyto(context) for context in contexts}
        for array in self._data.values():
            array.attach_grad(self._grad_req)

    # ---- the arrays

    def data(self, ctx: Context | None = None) -> Any:
        """Return the array on a context (None: the only one, or the current one).

        Raises:
            DeferredInitializationError: the first forward pass has not told the shape yet.
            MXNetError: it is not initialized, or not on that context.
        """
        self._check()
        if ctx is None and len(self._data) == 1:
            return next(iter(self._data.values()))
        ctx = ctx or current_context()
        if ctx not in self._data:
            there = ", ".join(map(str, self._data))
            raise MXNetError(
                f"{self.name} is not initialized on {ctx}, only on {there}: give one of these to "
                f"data(ctx), or initialize it with ctx=[...]"
            )
        return self._data[ctx]

    def list_data(self) -> list[Any]:
        """Return the arrays on all contexts."""
        self._check()
        return list(self._data.values())

    def grad(self, ctx: Context | None = None) -> Any:
        """Return the gradient on a context.

        Raises:
            MXNetError: it has none, because grad_req is "null".
        """
        found = self.data(ctx).grad
        if found is None:
            raise MXNetError(f"{self.name} has no gradient, because its grad_req is 'null'")
        return found

    def list_grad(self) -> list[Any]:
        """Return the gradients on all contexts."""
        return [self.grad(context) for context in self.list_ctx()]

    def list_ctx(self) -> list[Context]:
        """Return the contexts."""
        if self._deferred is not None:
            return self._deferred[1]
        self._check()
        return list(self._data)

    def set_data(self, data: Any) -> None:
        """Write values to the arrays on all contexts."""
        self.shape = data.shape
        if self._deferred is not None:
            self._place(data, self._deferred[1])
            self._deferred = None
        for context, array in self._data.items():
            array.detach()[:] = data.as_in_context(context).as_nd_ndarray()

    def load(self, data: Any, ctx: Context | Sequence[Context] | None) -> None:
        """Set the values; with `ctx`, move it to these contexts."""
        self.shape = data.shape
        if not self._data:
            self.initialize(ctx=ctx)
        elif ctx is not None:
            self.reset_ctx(ctx)
        self.set_data(data)

    def zero_grad(self) -> None:
        """Set the gradients to 0."""
        for array in self._data.values():
            array.zero_grad()

    def reset_ctx(self, ctx: Context | Sequence[Context]) -> None:
        """Move it to other contexts."""
        contexts = [ctx] if isinstance(ctx, Context) else [*ctx]
        if self._deferred is not None:
            maker, _, like = self._deferred
            self._deferred = (maker, contexts, like)
        else:
            self._place(self.list_data()[0].detach(), contexts)

    reset_device = reset_ctx

    def cast(self, dtype: Any) -> None:
        """Change the dtype."""
        self.dtype = numpy_dtype(torch_dtype(dtype))
        if self._data:
            self._place(self.list_data()[0].detach().astype(dtype), list(self._data))

    def var(self) -> Symbol:
        """Return the variable that stands for it in symbols."""
        spec = Spec(self._shape or (), torch_dtype(self.dtype)) if self.is_known else None
        return Symbol(self.name, spec=spec, parameter=self)

    def _check(self) -> None:
        if self._data:
            return
        if self._deferred is not None:
            raise DeferredInitializationError(
                f"the shape {self._shape} of {self.name} is not known yet: call the network with "
                f"data once, or give the number of inputs (in_units, in_channels)"
            )
        raise MXNetError(f"{self.name} is not initialized: call net.initialize() first")


class Constant(Parameter):
    """A parameter that is never trained."""

    def __init__(self, name: str, value: Any) -> None:
        shape = value.shape if hasattr(value, "shape") else (1,)
        super().__init__(name, "null", shape, init=initializers.Constant(value))


class _Exactly(initializers.Initializer):
    """Uses a parameter's own initializer for it, whatever its name."""

    def __init__(self, inner: initializers.Initializer) -> None:
        self._inner = inner

    def _init_zero(self, name: str, data: NDArray) -> None:
        self._inner(name, data)

    def make(self, name: str, shape: Sequence[int], dtype: Any) -> NDArray:
        """Return the values of a parameter."""
        return super().make("weight", shape, dtype)

    def _init_weight(self, name: str, data: NDArray) -> None:
        self._inner(name, data)


class ParameterDict(dict[str, Parameter]):
    """Parameters by name."""

    def __init__(self, prefix: str = "", found: Mapping[str, Parameter] | None = None) -> None:
        super().__init__(found or {})
        self.prefix = prefix
        self.on_get: Callable[[Parameter], object] = _ignore

    def get(self, name: str, default: Any = None, **options: Any) -> Any:
        """Return the parameter with this name after the prefix; make it if it is not there."""
        whole = self.prefix + name
        if whole in self:
            return self[whole]
        if name in self:
            return self[name]
        if not options and default is None:
            options = {}
        self[whole] = parameter = Parameter(whole, **options)
        self.on_get(parameter)
        return parameter

    def initialize(
        self, init: Init = None, ctx: Any = None, verbose: bool = False, force_reinit: bool = False
    ) -> None:
        """Initialize all parameters."""
        for parameter in self.values():
            parameter.initialize(None, ctx, init, force_reinit)

    def zero_grad(self) -> None:
        """Set all gradients to 0."""
        for parameter in self.values():
            parameter.zero_grad()

    def reset_ctx(self, ctx: Any) -> None:
        """Move all parameters to other contexts."""
        for parameter in self.values():
            parameter.reset_ctx(ctx)

    def setattr(self, name: str, value: Any) -> None:
        """Set an attribute of all parameters, such as `grad_req`."""
        for parameter in self.values():
            setattr(parameter, name, value)

    def select(self, pattern: str) -> ParameterDict:
        """Return those whose names match a regular expression."""
        found = {name: one for name, one in self.items() if re.match(pattern, name)}
        return ParameterDict(self.prefix, found)

    def __repr__(self) -> str:
        lines = "\n".join(f"  {one}" for one in self.values())
        return f"{self.prefix} (\n{lines}\n)"


def _ignore(parameter: Parameter) -> None:
    """Stand in for a block that no parameter belongs to."""
