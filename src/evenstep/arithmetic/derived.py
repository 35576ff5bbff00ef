"""Operations that follow from others by their form: in-place, `out=`, for lists, composite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from evenstep.arithmetic.arrays import written
from evenstep.arithmetic.exact import is_exact
from evenstep.arithmetic.operations import COMPOSED, KERNELS, operation
from evenstep.private_torch import dispatch


@functools.cache
def derived(op: Any) -> Callable[..., Any] | None:
    """Return a function that computes an operation by others; None if it follows from none.

    The function must be called inside the mode.
    """
    name = op.name().removeprefix("aten::").partition(".")[0]
    if name.startswith("_foreach_"):
        return _for_each(name.removeprefix("_foreach_"))
    arguments = _arguments(op)
    if name.endswith("_") and (functional := _taking(name[:-1], arguments)):
        return functools.partial(_in_place, functional)
    has_out = bool(arguments) and arguments[-1][0] == "out"
    if has_out and (functional := _taking(name, arguments[:-1])):
        return functools.partial(_out, functional)
    if op.has_kernel_for_dispatch_key(dispatch.DispatchKey.CompositeImplicitAutograd):
        decompose: Callable[..., Any] = op.decompose
        return decompose
    return None


def _arguments(op: Any) -> list[tuple[str, str]]:
    """Return names and types of what an operation takes."""
    return [(one.name, str(one.type)) for one in dispatch.arguments_of(op)]


def _taking(name: str, arguments: Sequence[tuple[str, str]]) -> Any:
    """Return the portable operation of that name that takes these arguments; None without any."""
    packet = getattr(torch.ops.aten, name, None)
    for overload in () if packet is None else packet.overloads():
        found = operation(f"{name}.{overload}")
        is_known = found in KERNELS or found in COMPOSED or is_exact(found)
        if is_known and _arguments(found) == arguments:
            return found
    return None


def _in_place(functional: Any, target: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return written(target, functional(target, *args, **kwargs))


def _out(functional: Any, *args: Any, out: torch.Tensor, **kwargs: Any) -> Any:
    result = functional(*args, **kwargs)
    out.resize_(result.shape)
    return written(out, result)


def _for_each(name: str) -> Callable[..., Any] | None:
    """Return a loop over the tensors of a list operation; None if the operation has no single."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return None

    scale = "value" if name.startswith("addc") else None  # positional for lists, by name for one

    def run(first: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        by_name = [scale] if scale and len(args) > 2 else ["dtype"] if name == "norm" else []
        if by_name:
            most = 2 if scale else 1
            args, kwargs = args[:most], {**kwargs, **dict(zip(by_name, args[most:], strict=False))}
        if not isinstance(first, list | tuple) or isinstance(kwargs.get("value"), torch.Tensor):
            return NotImplemented  # a number to the power of each; a tensor of factors
        results = []
        for number, tensor in enumerate(first):
            own = [_own(value, number) for value in args]
            own_options = {key: _own(value, number) for key, value in kwargs.items()}
            results.append(packet(tensor, *own, **own_options))
        return None if name.endswith("_") else results

    return run


def _own(value: Any, number: int) -> Any:
    return value[number] if isinstance(value, list | tuple) else value
