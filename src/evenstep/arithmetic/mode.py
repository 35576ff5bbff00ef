"""The mode in which every operation of torch has the same bits on every processor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from evenstep.arithmetic.composed import (  # noqa: F401 - these modules register what they have
    fused_optimizers,
    of_few,
    recurrent,
    transformer,
)
from evenstep.arithmetic.derived import derived
from evenstep.arithmetic.elements import (  # noqa: F401
    activations,
    elementwise,
    elementwise_losses,
    linear_combinations,
    order,
    random_numbers,
    ranges,
    remainders,
    selections,
)
from evenstep.arithmetic.exact import is_exact, needs_real
from evenstep.arithmetic.half_precision import HALF_PRECISION, in_float32
from evenstep.arithmetic.operations import COMPOSED, KERNELS
from evenstep.arithmetic.scattered import (  # noqa: F401
    embeddings,
    indexing,
    interpolation,
    overlaps,
    pooling,
)
from evenstep.arithmetic.sums import (  # noqa: F401
    attention,
    convolutions,
    losses,
    normalisation,
    products,
    reductions,
)
from evenstep.errors import ModelError
from evenstep.private_torch.dispatch import TorchDispatchMode


class PortableMode(TorchDispatchMode):
    """Inside `with`, the calling thread's operations are portable, or refused.

    The backward pass of what was computed inside is portable if it runs inside, too.
    """

    is_portable = True
    region: Any = None
    """Runs operations for several shards at once (`together/region.py`); None elsewhere."""

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation."""
        way = _WAYS.get(id(operation)) or _way_of(operation)
        if way.kernel is not None:
            result = way.kernel(*args, **kwargs)
        elif way.is_exact:
            if way.needs_real and any(map(_is_complex, args)):
                return self._run_other(operation, args, kwargs)
            return operation(*args, **kwargs)
        elif way.made_of is not None:
            with self:
                result = way.made_of(*args, **kwargs)
        else:
            return self._run_other(operation, args, kwargs)
        return self._run_other(operation, args, kwargs) if result is NotImplemented else result

    def _run_other(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation without a kernel for its arguments: integers, or half precision."""
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        if tensors and not any(map(_is_rounded, tensors)):
            result = operation(*args, **kwargs)
            if any(map(_is_rounded, _tensors([result]))):  # such as a function of integers
                return self._refuse(operation, args, kwargs, tensors)
            return result
        if any(one.dtype in HALF_PRECISION for one in tensors):
            with self:
                result = in_float32(operation, args, kwargs)
            if result is not NotImplemented:
                return result
        return self._refuse(operation, args, kwargs, tensors)

    def _refuse(
        self,
        operation: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        """Refuse an operation.

        Raises:
            ModelError: names the operation and the dtypes of its tensors.
        """
        raise ModelError(
            f"{_spelled(operation, tensors)} is not portable: portable arithmetic has no kernel "
            f"for it. docs/portable.md says what it has, and `evenstep doctor --model` lists what "
            f"a model needs"
        )


def _dispatch(
    mode: PortableMode,
    operation: Any,
    types: object,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Run one operation; called by torch, outside of the mode."""
    region = mode.region
    return (mode if region is None else region).run(operation, args, kwargs or {})


class _Way(NamedTuple):
    """How an operation is run: at most one of three ways."""

    kernel: Callable[..., Any] | None
    is_exact: bool
    made_of: Callable[..., Any] | None
    needs_real: bool


_WAYS: dict[int, _Way] = {}
"""By the `id` of an operation, which torch keeps for ever. Hashing an operation takes longer."""


def _way_of(operation: Any) -> _Way:
    kernel, exact = KERNELS.get(operation), is_exact(operation)
    made_of = None if kernel or exact else COMPOSED.get(operation) or derived(operation)
    return _WAYS.setdefault(id(operation), _Way(kernel, exact, made_of, needs_real(operation)))


# torch wraps the method for its compiler, which takes as long as the rest of a small operation.
PortableMode.__torch_dispatch__ = _dispatch  # type: ignore[method-assign, assignment]


class Survey(PortableMode):
    """A mode that lists operations, and runs those that are not portable by torch's own kernels.

    Attributes:
        found: the names of all operations that were called.
        refused: those that portable arithmetic refuses, with the dtypes of their tensors.
    """

    is_portable = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = set[str]()
        self.refused = set[str]()

    def run(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Note an operation and run it."""
        self.found.add(operation.name())
        return super().run(operation, args, kwargs)

    def _refuse(
        self,
        operation: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> Any:
        self.refused.add(_spelled(operation, tensors))
        return operation(*args, **kwargs)


def _is_complex(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_complex()


def _is_rounded(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _spelled(operation: Any, tensors: Sequence[torch.Tensor]) -> str:
    dtypes = " and ".join(sorted({str(one.dtype).removeprefix("torch.") for one in tensors}))
    return f"{operation.name()} of {dtypes}" if dtypes else operation.name()


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found
