"""Activations and their gradients.

The gradient of an activation is that of its result times the slope, which has a rounding error of a
few units in the last place of the larger of its parts. `c/elementwise.c` has the formulas.
"""

from __future__ import annotations

import math

import torch

from evenstep.arithmetic.arrays import Scalar
from evenstep.arithmetic.elements.elementwise import (
    REFUSED,
    apply,
    apply_to_one,
    logit_range,
    of_two,
    unary,
)
from evenstep.arithmetic.native import Function
from evenstep.arithmetic.operations import kernel

for _name in ("silu", "mish", "hardswish", "hardsigmoid"):
    kernel(_name)(unary(_name))
    kernel(f"{_name}_backward")(of_two(f"{_name}_backward"))
for _name in ("sigmoid_backward", "tanh_backward"):  # of the gradient, and the function's result
    kernel(_name)(of_two(_name))

_GELU = {"none": unary("gelu"), "tanh": unary("gelu_tanh")}
_GELU_BACKWARD = {"none": of_two("gelu_backward"), "tanh": of_two("gelu_tanh_backward")}


@kernel("gelu")
def gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """Return x Φ(x) within 6 ulp, Φ the normal distribution, or its approximation by tanh."""
    return _GELU[approximate](x)


@kernel("gelu_backward")
def gelu_backward(
    gradient: torch.Tensor, x: torch.Tensor, *, approximate: str = "none"
) -> torch.Tensor:
    """Return gradient · (Φ(x) + x Φ'(x))."""
    return _GELU_BACKWARD[approximate](gradient, x)


_softplus = Function("softplus", "lpddp")
_softplus_backward = Function("softplus_backward", "lppddp")


@kernel("softplus")
def softplus(x: torch.Tensor, beta: Scalar = 1, threshold: Scalar = 20) -> torch.Tensor:
    """Return ln(1 + exp(beta x)) / beta, or x where beta x is above the threshold."""
    return apply_to_one(_softplus, x, float(beta), float(threshold))


@kernel("softplus_backward")
def softplus_backward(
    gradient: torch.Tensor, x: torch.Tensor, beta: Scalar, threshold: Scalar
) -> torch.Tensor:
    """Return gradient / (1 + exp(−beta x)), or the gradient where beta x is above the threshold."""
    return apply(_softplus_backward, (gradient, x), float(beta), float(threshold))


_elu = Function("elu", "lpdddp")
_elu_backward = Function("elu_backward", "lppdddp")
_elu_backward_of_result = Function("elu_backward_of_result", "lppdddp")


@kernel("elu")
def elu(
    x: torch.Tensor, alpha: Scalar = 1, scale: Scalar = 1, input_scale: Scalar = 1
) -> torch.Tensor:
    """Return scale · x for positive x, else scale · alpha · (exp(input_scale · x) − 1)."""
    return apply_to_one(_elu, x, float(alpha * scale), float(scale), float(input_scale))


@kernel("celu")
def celu(x: torch.Tensor, alpha: Scalar = 1.0) -> torch.Tensor:
    """Return x for positive x, else alpha · (exp(x / alpha) − 1)."""
    return elu(x, alpha, 1, 1 / alpha)


@kernel("elu_backward")
def elu_backward(
    gradient: torch.Tensor,
    alpha: Scalar,
    scale: Scalar,
    input_scale: Scalar,
    is_result: bool,
    x: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of `elu` at x, or where its result is x if `is_result`."""
    run = _elu_backward_of_result if is_result else _elu_backward
    return apply(run, (gradient, x), float(alpha * scale), float(scale), float(input_scale))


_log_sigmoid = unary("log_sigmoid")
_log_sigmoid_backward = of_two("log_sigmoid_backward")


@kernel("log_sigmoid_forward")
def log_sigmoid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return −ln(1 + exp(−x)), and an empty buffer: the gradient is computed from x."""
    result = _log_sigmoid(x)
    if result is REFUSED:
        return NotImplemented
    return result, x.new_empty(0)


@kernel("log_sigmoid_backward")
def log_sigmoid_backward(
    gradient: torch.Tensor, x: torch.Tensor, buffer: torch.Tensor
) -> torch.Tensor:
    """Return gradient / (1 + exp(x))."""
    return _log_sigmoid_backward(gradient, x)


_logit_backward = Function("logit_backward", "lppdddp")


@kernel("logit_backward")
def logit_backward(
    gradient: torch.Tensor, x: torch.Tensor, eps: float | None = None
) -> torch.Tensor:
    """Return gradient / (x (1 − x)); 0 where `logit` changes x, NaN where it is not defined."""
    if eps is None or eps < 0:
        return apply(_logit_backward, (gradient, x), 0.0, 1.0, math.nan)
    return apply(_logit_backward, (gradient, x), *logit_range(eps), 0.0)


_glu = of_two("glu")
_glu_slope = of_two("glu_slope")
_sigmoid_of_gate = unary("sigmoid")


def _halves(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = x.shape[dim]
    if size % 2:
        raise RuntimeError(f"glu needs an even size to halve, but dimension {dim} has {size}")
    return x.narrow(dim, 0, size // 2), x.narrow(dim, size // 2, size // 2)


@kernel("glu")
def glu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return a / (1 + exp(−b)), a and b the halves of x along a dimension."""
    a, b = _halves(x, dim)
    return _glu(a, b)


@kernel("glu_backward")
def glu_backward(gradient: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the gradients of both halves: gradient · s and gradient · (a · (s · (1 − s)))."""
    a, b = _halves(x, dim)
    gate, slope = _sigmoid_of_gate(b), _glu_slope(a, b)
    if gate is REFUSED or slope is REFUSED:
        return REFUSED
    return torch.cat([gradient * gate, gradient * slope], dim)
