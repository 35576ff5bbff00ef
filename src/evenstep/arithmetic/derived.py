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
    name, _, overload = op.name().removeprefix("aten::").partition(".")
    if name.startswith("_foreach_"):
        return _for_each(name.removeprefix("_foreach_"))
    if name.endswith("_") and (functional := _known(name[:-1], overload)):
        return functools.partial(_in_place, functional)
    if functional := _without_out(name, _arguments(op)):
        return functools.partial(_out, functional)
    if op.has_kernel_for_dispatch_key(dispatch.DispatchKey.CompositeImplicitAutograd):
        decompose: Callable[..., Any] = op.decompose
        return decompose
    return None


def _arguments(op: Any) -> list[tuple[str, str]]:
    """Return names and types of what an operation takes."""
    return [(one.name, str(one.type)) for one in dispatch.arguments_of(op)]


def _without_out(name: str, arguments: Sequence[tuple[str, str]]) -> Any:
    """Return the portable operation that returns what one with `arguments` writes to its `out`."""
    *others, (last, _) = arguments or [("", "")]
    for overload in getattr(torch.ops.aten, name).overloads() if last == "out" else ():
        functional = _known(name, overload)
        if functional is not None and _arguments(functional) == others:
            return functional
    return None


def _known(name: str, overload: str) -> Any:
    """Return the operation of a name; None if it is not portable."""
    found = operation(f"{name}.{overload}")
    is_known = found in KERNELS or found in COMPOSED or (found is not None and is_exact(found))
    return found if is_known else None


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
        if scale and len(args) > 2:
            args, kwargs = args[:2], {scale: args[2]}
        results = []
        for number, tensor in enumerate(first):
            own = [_own(value, number) for value in args]
            own_options = {key: _own(value, number) for key, value in kwargs.items()}
            results.append(packet(tensor, *own, **own_options))
        return None if name.endswith("_") else results

    return run


def _own(value: Any, number: int) -> Any:
    return value[number] if isinstance(value, list | tuple) else value
