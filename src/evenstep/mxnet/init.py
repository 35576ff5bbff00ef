"""Initializers of parameters: Normal, Xavier, Constant, ..."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from evenstep.errors import MXNetError
from evenstep.mxnet.core.array import NDArray
from evenstep.mxnet.core.context import cpu
from evenstep.mxnet.core.make import Maker, Random

__all__ = [
    "Constant",
    "Initializer",
    "MSRAPrelu",
    "Normal",
    "One",
    "Uniform",
    "Xavier",
    "Zero",
    "create",
]

_MAKE = Maker(NDArray).functions()
_RANDOM = Random(NDArray)


class Initializer:
    """Makes the first values of a parameter, on cpu(0), from where every context gets a copy.

    A subclass overrides `_init_weight(name, data)`, which writes to an array.
    """

    def make(self, name: str, shape: Sequence[int], dtype: Any) -> NDArray:
        """Return the values of a parameter."""
        data: NDArray = _MAKE["zeros"](tuple(shape), ctx=cpu())
        if name.endswith(("bias", "beta", "running_mean", "moving_mean")):
            self._init_zero(name, data)
        elif name.endswith(("gamma", "running_var", "moving_var")):
            data[:] = 1
        else:
            self._init_weight(name, data)
        if data.dtype != dtype:
            data = data.astype(dtype)
        return data

    def _init_zero(self, name: str, data: NDArray) -> None:
        data[:] = 0

    def _init_weight(self, name: str, data: NDArray) -> None:
        raise NotImplementedError("an initializer defines _init_weight(name, data)")

    def __call__(self, name: Any, data: NDArray) -> None:
        """Write the values of a weight to an array."""
        self._init_weight(str(name), data)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({given})"


class Constant(Initializer):
    """One value for all elements, also of biases if the parameter has this initializer itself."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def _init_weight(self, name: str, data: NDArray) -> None:
        data[:] = self.value


class Zero(Constant):
    """Zeros."""

    def __init__(self) -> None:
        super().__init__(0)


class One(Constant):
    """Ones."""

    def __init__(self) -> None:
        super().__init__(1)


class Uniform(Initializer):
    """The uniform distribution on [-scale, scale). MXNet's default, with 0.07."""

    def __init__(self, scale: float = 0.07) -> None:
        self.scale = scale

    def _init_weight(self, name: str, data: NDArray) -> None:
        data[:] = _RANDOM.uniform(-self.scale, self.scale, data.shape, ctx=cpu())


class Normal(Initializer):
    """The normal distribution with mean 0 and standard deviation `sigma`."""

    def __init__(self, sigma: float = 0.01) -> None:
        self.sigma = sigma

    def _init_weight(self, name: str, data: NDArray) -> None:
        data[:] = _RANDOM.normal(0, self.sigma, data.shape, ctx=cpu())


class Xavier(Initializer):
    """Glorot and Bengio, 2010: a scale by the numbers of inputs and outputs of a layer.

    Args:
        rnd_type: "uniform" or "gaussian".
        factor_type: "avg", "in" or "out": which number is used.
        magnitude: the scale is the square root of `magnitude` over that number.
    """

    def __init__(
        self, rnd_type: str = "uniform", factor_type: str = "avg", magnitude: float = 3
    ) -> None:
        self.rnd_type = rnd_type
        self.factor_type = factor_type
        self.magnitude = magnitude

    def _init_weight(self, name: str, data: NDArray) -> None:
        shape = data.shape
        if len(shape) < 2:
            raise MXNetError(f"got the shape {shape} of {name}: Xavier needs at least two axes")
        area = math.prod(shape[2:])
        inputs, outputs = shape[1] * area, shape[0] * area
        factor = {"avg": (inputs + outputs) / 2, "in": inputs, "out": outputs}[self.factor_type]
        scale = math.sqrt(self.magnitude / factor)
        if self.rnd_type == "uniform":
            data[:] = _RANDOM.uniform(-scale, scale, shape, ctx=cpu())
        else:
            data[:] = _RANDOM.normal(0, scale, shape, ctx=cpu())


class MSRAPrelu(Xavier):
    """He et al., 2015: for layers before a (leaky) ReLU."""

    def __init__(self, factor_type: str = "avg", slope: float = 0.25) -> None:
        super().__init__("gaussian", factor_type, 2 / (1 + slope**2))


_NAMED: dict[str, Callable[[], Initializer]] = {
    "zeros": Zero,
    "ones": One,
    "normal": Normal,
    "uniform": Uniform,
    "xavier": Xavier,
}


def create(init: Initializer | str | None) -> Initializer:
    """Return an initializer for itself, its name, or None (Uniform)."""
    if init is None:
        return Uniform()
    if isinstance(init, Initializer):
        return init
    if init not in _NAMED:
        raise MXNetError(
            f"got init={init!r}: use one of {', '.join(_NAMED)}, or mx.init.Normal(...)"
        )
    return _NAMED[init]()
