"""Constants in the place of random numbers, so that a loss that draws some can be compared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from evenstep.private_torch.dispatch import DispatchKey, OpsMode, arguments_of, run_kernel

_HALF = 0.5


class ConstantNumbers(OpsMode):
    """A dispatch mode in which every random op gives the same numbers for every example.

    An element's number depends on nothing but the op, and a permutation of n things is their
    reversal. So two shards together draw what they draw apart, unless the numbers mix examples.
    `unknown` has the names of ops that still drew random numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unknown: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`; replace the numbers that it has drawn."""
        kwargs = kwargs or {}
        parts = _parts_of(func) if func.namespace != "aten" else None
        if parts is not None:  # a custom op, which may draw inside
            with self:
                return parts(*args, **kwargs)
        result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return result
        name = func.overloadpacket.__name__
        given = _arguments(func, args, kwargs)
        if given.get("dropout_p") == 0 or given.get("training") is False:
            return result  # fused attention and RReLU, which draw in training only
        if name == "native_dropout":
            return given["input"].clone(), torch.ones_like(result[1])
        if name == "multinomial":
            return result.copy_(given["self"].topk(given["num_samples"]).indices)
        if name == "_sample_dirichlet":
            return given["self"] / given["self"].sum(-1, keepdim=True)
        if name == "_standard_gamma":
            return given["self"].clone()
        if name == "randperm":
            return result.copy_(torch.arange(len(result) - 1, -1, -1))
        is_seed = func.name().endswith(".low_out")  # of compiled code, which draws by itself
        if isinstance(result, torch.Tensor) and name in _NUMBERS and not is_seed:
            return result.fill_(_number(result, given))
        self.unknown.append(name)
        return result


@functools.cache
def _parts_of(func: Any) -> Callable[..., Any] | None:
    """Return the kernel of a custom op that is made of other ops, or None.

    Inside a mode it calls these ops inside the mode, as an op alone does not.
    """
    for key in (DispatchKey.CompositeImplicitAutograd, DispatchKey.CompositeExplicitAutograd):
        if func.has_kernel_for_dispatch_key(key):
            return functools.partial(run_kernel, func, key)
    return None


_BASE_NAMES = (
    *("rand", "randn", "randint", "random", "uniform", "normal", "bernoulli", "exponential"),
    *("log_normal", "cauchy", "geometric"),
)
_NUMBERS = frozenset(name + form for name in _BASE_NAMES for form in ("", "_", "_like"))


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, with the defaults of those that are left out."""
    taken = arguments_of(func)
    defaults = {one.name: one.default_value for one in taken if one.has_default_value()}
    positional = zip((one.name for one in taken), args, strict=False)
    return {**defaults, **dict(positional), **kwargs}


def _number(drawn: torch.Tensor, given: dict[str, Any]) -> float:
    low = given.get("low", given.get("from")) or 0
    high = given.get("high", given.get("to"))
    if not drawn.is_floating_point() and not drawn.is_complex():
        return low
    return _HALF if high is None else (low + high) / 2
