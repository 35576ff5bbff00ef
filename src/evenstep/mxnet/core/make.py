"""Makes arrays: from values of the program, from constants, and from random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from evenstep.mxnet.core.array import NDArray, from_values
from evenstep.mxnet.core.context import Context, current_context
from evenstep.mxnet.core.invoke import submit
from evenstep.mxnet.core.operand import Operator
from evenstep.mxnet.core.types import torch_dtype
from evenstep.mxnet.ops import creation, random, shapes

Shape = int | Sequence[int]

_NUMBERS = {
    name: Operator(name, getattr(creation, name))
    for name in ("arange", "eye", "full", "linspace", "ones", "zeros")
}
_RANDOM = {
    name: Operator(f"random.{name}", getattr(random, name))
    for name in ("exponential", "normal", "randint", "uniform")
}


class Maker:
    """The functions of `nd` or `np` that make arrays.

    Args:
        like: the class of the arrays, NDArray or ndarray.
    """

    def __init__(self, like: type[NDArray]) -> None:
        self._like = like

    def _made(self, op: Operator, context: Context | None, *arguments: Any) -> Any:
        context = context or current_context()
        return submit(op, arguments, {}, like=self._like, context=context)

    def array(
        self,
        source_array: Any,
        ctx: Context | None = None,
        dtype: Any = None,
        device: Context | None = None,
    ) -> Any:
        """Return an array with a copy of some values: a list, a number, numpy's or torch's array.

        Without a dtype, lists become float32.
        """
        return from_values(source_array, ctx or device or current_context(), dtype, self._like)

    def _filled(self, name: str) -> Callable[..., Any]:
        def make(
            shape: Shape,
            ctx: Context | None = None,
            dtype: Any = None,
            device: Context | None = None,
            **unused: Any,
        ) -> Any:
            if not isinstance(ctx, Context | None):  # np has dtype as its second argument
                ctx, dtype = None, ctx
            size = shapes.as_shape(shape)
            return self._made(_NUMBERS[name], ctx or device, size, torch_dtype(dtype))

        return make

    def full(self, shape: Shape, val: float, ctx: Context | None = None, dtype: Any = None) -> Any:
        """Return an array of one value."""
        return self._made(_NUMBERS["full"], ctx, shapes.as_shape(shape), torch_dtype(dtype), val)

    def arange(
        self,
        start: float,
        stop: float | None = None,
        step: float = 1,
        repeat: int = 1,
        ctx: Context | None = None,
        dtype: Any = None,
        device: Context | None = None,
    ) -> Any:
        """Return numbers from `start` (or 0) to `stop`, float32 without a dtype."""
        first, last = (0, start) if stop is None else (start, stop)
        return self._made(
            _NUMBERS["arange"], ctx or device, first, last, step, repeat, torch_dtype(dtype)
        )

    def linspace(
        self,
        start: float,
        stop: float,
        num: int = 50,
        endpoint: bool = True,
        ctx: Context | None = None,
        dtype: Any = None,
    ) -> Any:
        """Return `num` evenly spaced numbers."""
        return self._made(_NUMBERS["linspace"], ctx, start, stop, num, endpoint, torch_dtype(dtype))

    def eye(
        self,
        N: int,
        M: int = 0,
        k: int = 0,
        ctx: Context | None = None,
        dtype: Any = None,
    ) -> Any:
        """Return ones on a diagonal of an N × M matrix, and zeros elsewhere."""
        return self._made(_NUMBERS["eye"], ctx, N, M or N, k, torch_dtype(dtype))

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Return the functions by name."""
        found = {
            name: getattr(self, name) for name in ("array", "full", "arange", "linspace", "eye")
        }
        return (
            found
            | {name: self._filled(name) for name in ("ones", "zeros")}
            | {
                "empty": self._filled("zeros"),
            }
        )


class Random:
    """The functions of `nd.random`, or with `size` for `shape` those of `np.random`.

    Every context has a generator of its own, and its operations draw in the order in which they
    were queued.
    """

    def __init__(self, like: type[NDArray]) -> None:
        self._like = like

    def _drawn(self, name: str, numbers: Any, shape: Any, size: Any, dtype: Any, ctx: Any) -> Any:
        shape = shapes.as_shape(size if size is not None else () if shape is None else shape)
        if not shape and self._like.table == "nd":
            shape = (1,)
        return submit(
            _RANDOM[name],
            (shape, torch_dtype(dtype), *numbers),
            {},
            like=self._like,
            context=ctx or current_context(),
        )

    def uniform(
        self,
        low: float = 0.0,
        high: float = 1.0,
        shape: Shape | None = None,
        dtype: Any = None,
        ctx: Context | None = None,
        *,
        size: Shape | None = None,
        device: Context | None = None,
    ) -> Any:
        """Draw from the uniform distribution on [low, high)."""
        return self._drawn("uniform", (low, high), shape, size, dtype, ctx or device)

    def normal(
        self,
        loc: float = 0.0,
        scale: float = 1.0,
        shape: Shape | None = None,
        dtype: Any = None,
        ctx: Context | None = None,
        *,
        size: Shape | None = None,
        device: Context | None = None,
    ) -> Any:
        """Draw from the normal distribution with mean `loc` and standard deviation `scale`."""
        return self._drawn("normal", (loc, scale), shape, size, dtype, ctx or device)

    def randn(self, *shape: int, **options: Any) -> Any:
        """Draw from the standard normal distribution."""
        return self.normal(shape=shape, **options)

    def rand(self, *shape: int, **options: Any) -> Any:
        """Draw from the uniform distribution on [0, 1)."""
        return self.uniform(shape=shape, **options)

    def randint(
        self,
        low: int,
        high: int | None = None,
        shape: Shape | None = None,
        dtype: Any = "int32",
        ctx: Context | None = None,
        *,
        size: Shape | None = None,
    ) -> Any:
        """Draw integers from `low` (or 0) to `high` - 1."""
        ends = (0, low) if high is None else (low, high)
        return self._drawn("randint", ends, shape, size, dtype or "int32", ctx)

    def exponential(
        self,
        scale: float = 1.0,
        shape: Shape | None = None,
        dtype: Any = None,
        ctx: Context | None = None,
        *,
        size: Shape | None = None,
    ) -> Any:
        """Draw from the exponential distribution with mean `scale`."""
        return self._drawn("exponential", (scale,), shape, size, dtype, ctx)

    def shuffle(self, data: NDArray) -> Any:
        """Return the rows in a random order; `np.random.shuffle` changes the array itself."""
        mixed = Operator("random.shuffle", random.shuffle)(data)
        if self._like.table == "np":
            data[:] = mixed
            return None
        return mixed

    def multinomial(self, data: NDArray, shape: int = 1) -> Any:
        """Draw indices with the probabilities in the rows of `data`."""
        return Operator("random.multinomial", random.multinomial)(data, shape=shape)

    def bernoulli(self, prob: NDArray) -> Any:
        """Draw 0 or 1 with the probabilities in `prob`."""
        return Operator("random.bernoulli", random.draw_signs)(prob)
