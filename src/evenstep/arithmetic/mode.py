"""The mode in which every operation of torch has the same bits on every processor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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

    def __torch_dispatch__(
        self,
        operation: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation; called by torch, outside of the mode."""
        kwargs = kwargs or {}
        run = KERNELS.get(operation)
        if run is not None:
            result = run(*args, **kwargs)
            if result is NotImplemented:
                return self._run_other(operation, args, kwargs)
            return result
        if is_exact(operation):
            if needs_real(operation) and any(map(_is_complex, args)):
                return self._run_other(operation, args, kwargs)
            return operation(*args, **kwargs)
        made_of = COMPOSED.get(operation) or derived(operation)
        if made_of is None:
            return self._run_other(operation, args, kwargs)
        with self:
            result = made_of(*args, **kwargs)
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

    def __torch_dispatch__(
        self,
        operation: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Note an operation and run it."""
        self.found.add(operation.name())
        return super().__torch_dispatch__(operation, types, args, kwargs)

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
