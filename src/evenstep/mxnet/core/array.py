"""Arrays: `NDArray` of `nd`, and `ndarray` of `np`.

An array is a chunk of memory that may not be computed yet, the way to its own part of it, and its
shape and dtype, which are known at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch

from evenstep.errors import MXNetError, hides_own_frames
from evenstep.mxnet.core import tape
from evenstep.mxnet.core.context import Context, current_context
from evenstep.mxnet.core.differentiate import backward
from evenstep.mxnet.core.invoke import Base, own, run, spec_of, submit
from evenstep.mxnet.core.operand import Operator, filled, operands, operator
from evenstep.mxnet.core.runtime import Chunk, runtime
from evenstep.mxnet.core.types import Spec, numpy_dtype, torch_dtype
from evenstep.mxnet.ops import shapes

_SELECT = Operator("x[...]", shapes.select)
_COPY = Operator("copyto", shapes.same)


class NDArray(Base):
    """An array of `nd`. Its operations are queued; reading a value waits for them."""

    __slots__ = ()
    table: ClassVar[str] = "nd"

    # ---- facts that are known at once

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        shape: tuple[int, ...] = self.spec.shape
        return shape

    @property
    def dtype(self) -> Any:
        """The dtype, as numpy's type."""
        return numpy_dtype(self.spec.dtype)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def ctx(self) -> Context:
        """The context that holds it."""
        return self.context

    device = ctx

    @property
    def grad(self) -> NDArray | None:
        """The array of gradients, after `attach_grad`."""
        node = self.chunk.node
        if node is None or node.gradient is None or not self.path:
            return None if node is None else node.gradient
        return type(self)(node.gradient.chunk, self.spec, self.context, self.path)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array without axes has no length")
        return self.shape[0]

    # ---- reading values: all of these wait

    @hides_own_frames
    def wait_to_read(self) -> None:
        """Wait until it is computed.

        Raises:
            MXNetError: an operation that it depends on has failed; the message names the line that
                queued it.
        """
        self.chunk.wait_to_read()

    @hides_own_frames
    def asnumpy(self) -> np.ndarray[Any, Any]:
        """Wait, and return a copy of the values."""
        self.chunk.wait_to_read()
        with torch.no_grad():
            values: np.ndarray[Any, Any] = self.value().detach().to("cpu", copy=True).numpy()
        return values

    @hides_own_frames
    def asscalar(self) -> Any:
        """Wait, and return the only element as a number."""
        if self.size != 1:
            raise MXNetError(f"got an array of shape {self.shape}: only one element is a scalar")
        return self.asnumpy().item()

    item = asscalar

    def tolist(self) -> Any:
        """Wait, and return the values as nested lists."""
        return self.asnumpy().tolist()

    def __float__(self) -> float:
        return float(self.asscalar())

    def __int__(self) -> int:
        return int(self.asscalar())

    __index__ = __int__

    def __bool__(self) -> bool:
        return bool(self.asscalar())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self.asnumpy().astype(dtype or self.dtype, copy=False)

    def __format__(self, spec: str) -> str:
        return format(self.asscalar(), spec) if spec else str(self)

    def __repr__(self) -> str:
        size = "x".join(map(str, self.shape))
        return f"\n{self.asnumpy()}\n<{type(self).__name__} {size} @{self.context}>"

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    # ---- parts

    def __getitem__(self, key: Any) -> Any:
        """Return a part: a view for numbers and slices, a copy for arrays of indices."""
        key = self._key(key)
        if shapes.is_basic(key):
            return self._view(f"x[{shapes.key_text(key)}]", shapes.Index(key, self.table == "nd"))
        return self.invoke(_SELECT, (self, key), {})

    @hides_own_frames
    def __setitem__(self, key: Any, value: Any) -> None:
        """Write a part, after everything queued so far that reads it."""
        key = self._key(key)
        if isinstance(value, NDArray) and value.is_part(
            self, shapes.Index(key, self.table == "nd")
        ):
            return  # the second half of `x[key] += 1`
        value = self._operand(value)
        shape = value.shape if isinstance(value, NDArray) else np.shape(value)
        part = spec_of(_SELECT, (self, key))
        if part is not None and not shapes.fits(shape, part.shape):
            raise MXNetError(f"got values of shape {shape} for a part of shape {part.shape}")

        def write(target: torch.Tensor, new: Any) -> None:
            target[shapes.as_indices(filled(key, lambda array: array.value()))] = new

        self._write("x[...] = y", write, value, *operands([key]))

    def reshape(self, *shape: Any, reverse: bool = False) -> Any:
        """Return a view of a new shape; one size may be -1, and 0 stands for the size before."""
        given = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        wanted = shapes.wanted_shape(self.shape, shapes.as_shape(given))
        return self._view("reshape", lambda tensor: tensor.reshape(wanted))

    def reshape_like(self, other: NDArray) -> Any:
        """Return a view with the shape of another array."""
        return self.reshape(other.shape)

    def detach(self) -> Any:
        """Return a view through which nothing is differentiated."""
        return self._view("detach", torch.Tensor.detach, detached=True)

    @property
    def T(self) -> Any:  # noqa: N802 - MXNet's name
        """The transpose, a copy."""
        return operator(self.table, "transpose")(self)

    # ---- writing in place

    def __iadd__(self, other: Any) -> Any:
        return self._updated("+=", torch.Tensor.add_, other)

    def __isub__(self, other: Any) -> Any:
        return self._updated("-=", torch.Tensor.sub_, other)

    def __imul__(self, other: Any) -> Any:
        return self._updated("*=", torch.Tensor.mul_, other)

    def __itruediv__(self, other: Any) -> Any:
        return self._updated("/=", torch.Tensor.div_, other)

    def _updated(self, name: str, update: Any, other: Any) -> Any:
        """Queue an update in place by an operand that may be smaller, but not larger."""
        if isinstance(other, Base | np.ndarray) and not shapes.fits(other.shape, self.shape):
            raise MXNetError(f"{name} of arrays of shapes {self.shape} and {other.shape}")
        return self._write(name, update, other)

    def _write(self, name: str, write: Any, other: Any, *more: Any) -> Any:
        """Queue `write(own tensor, other)`, which changes the own tensor in place."""
        other = self._operand(other)
        if tape.modes().recording and (self.is_tracked or getattr(other, "is_tracked", False)):
            raise MXNetError(
                f"{name} changes an array in place while autograd records it: write "
                f"`x = x + y`, or do it inside autograd.pause()"
            )
        if isinstance(other, NDArray) and other.context != self.context:
            raise MXNetError(
                f"{name} got arrays in {self.context} and in {other.context}: copy one of them "
                f"with as_in_context({self.context})"
            )
        run(name, self.context, lambda: self._change(write, other), [other, *more], writes=[self])
        return self

    def _change(self, write: Any, other: Any) -> None:
        with torch.no_grad():
            memory, target = self.chunk.value_in_task(), self.value()
            if isinstance(other, Base):
                overlaps = other.chunk is self.chunk
                other = other.value().clone() if overlaps else other.value()
            write(target, other)
            if target.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr():
                raise MXNetError("this reshaped part is a copy, so it can't be written to")

    # ---- copies

    def copy(self) -> Any:
        """Return a copy in the same context."""
        return self.copyto(self.context)

    def copyto(self, other: Any) -> Any:
        """Copy to a context, or into another array; copying lanes work beside computing ones."""
        if isinstance(other, Context):
            return submit(_COPY, (self,), {}, like=type(self), context=other, copies=True)
        if other.shape != self.shape:
            raise MXNetError(f"got an array of shape {other.shape} to copy {self.shape} into")
        run(
            "copyto",
            other.context,
            lambda: other._change(torch.Tensor.copy_, self),
            [self],
            writes=[other],
            copies=True,
        )
        return other

    def as_in_context(self, context: Context) -> Any:
        """Return the array itself if it is in that context, otherwise a copy there."""
        return self if context == self.context else self.copyto(context)

    as_in_ctx = to_device = as_in_context

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        """Return it with a different dtype."""
        if not copy and torch_dtype(dtype) == self.spec.dtype:
            return self
        return operator(self.table, "astype")(self, dtype=torch_dtype(dtype))

    def as_nd_ndarray(self) -> NDArray:
        """Return the same memory as an array of `nd`."""
        return NDArray(self.chunk, self.spec, self.context, self.path)

    def as_np_ndarray(self) -> ndarray:
        """Return the same memory as an array of `np`."""
        return ndarray(self.chunk, self.spec, self.context, self.path)

    # ---- gradients

    def attach_grad(self, grad_req: str = "write", stype: str | None = None) -> None:
        """Make it a leaf of the graph that `autograd.record` records, with a gradient of zeros.

        Args:
            grad_req: "write" for the gradient of the last backward pass, "add" for the sum of
                all, "null" for none.
            stype: not used.
        """
        if grad_req not in ("write", "add", "null"):
            raise MXNetError(f"got grad_req={grad_req!r}: use 'write', 'add' or 'null'")
        if not self.spec.dtype.is_floating_point:
            raise MXNetError(f"got an array of {self.dtype.__name__}: only floats have gradients")
        if self.path and self.chunk.node is not None:  # others differentiate through this memory
            # Queued tasks hold this object, so the copy is made of another one.
            same = type(self)(self.chunk, self.spec, self.context, self.path, self.is_detached)
            self.chunk, self.path, self.is_detached = same.copy().chunk, (), False
        own(self.chunk, self.context, grad_req != "null")
        self.chunk.node = None
        if grad_req != "null":
            whole = type(self)(self.chunk, self.chunk.spec, self.context)
            gradient = operator(self.table, "zeros_like")(whole)
            self.chunk.node = tape.Node(self.chunk, (), gradient, grad_req)

    def zero_grad(self) -> None:
        """Set the gradient to 0."""
        if self.grad is not None:
            self.grad[:] = 0

    def backward(
        self, out_grad: Any = None, retain_graph: bool = False, train_mode: bool = True
    ) -> None:
        """Queue the backward pass from this array; see `autograd.backward`."""
        backward([self], None if out_grad is None else [out_grad], retain_graph)

    # ---- used by operations

    def invoke(self, op: Operator, arguments: Any, options: Any) -> Any:
        """Queue an operation."""
        arguments = tuple(self._operand(one) for one in arguments)
        return submit(op, arguments, options, like=type(self), context=self.context)

    def _operand(self, value: Any) -> Any:
        """Return numpy's arrays as arrays in this context; everything else as it is."""
        if isinstance(value, np.ndarray) and value.ndim:
            return from_values(value, self.context, value.dtype, type(self))
        return value.item() if isinstance(value, np.generic | np.ndarray) else value

    def _key(self, key: Any) -> Any:
        if isinstance(key, tuple):
            return tuple(self._key(one) for one in key)
        if isinstance(key, list):
            key = np.asarray(key)
        return self._operand(key)

    def _view(self, name: str, step: Any, *, detached: bool = False) -> Any:
        try:
            spec = Spec.of(step(self.spec.meta()))
        except (RuntimeError, IndexError, TypeError) as error:
            raise (IndexError if isinstance(error, IndexError) else MXNetError)(
                f"{name} of an array of shape {self.shape}: {error}"
            ) from None
        path = (*self.path, step)
        return type(self)(self.chunk, spec, self.context, path, detached or self.is_detached)


class ndarray(NDArray):  # noqa: N801 - MXNet's name
    """An array of `np`. Its operations are queued; reading a value waits for them."""

    __slots__ = ()
    table: ClassVar[str] = "np"

    def __repr__(self) -> str:
        text = np.array2string(self.asnumpy(), separator=", ", prefix="array(")
        where = "" if self.context.device_type == "cpu" else f", ctx={self.context}"
        return f"array({text}{where})"

    def __str__(self) -> str:
        return str(self.asnumpy())


def from_values(values: Any, context: Context | None, dtype: Any, like: type[NDArray]) -> Any:
    """Return an array of numbers that the program has: a list, a number, numpy's or torch's array.

    Args:
        values: the numbers, which are copied.
        context: where to put it; None for the current context.
        dtype: None for that of `values` if they are an array, otherwise float32.
        like: NDArray or ndarray.
    """
    if isinstance(values, NDArray):
        found = values.copyto(context or values.context)
        return like(found.chunk, found.spec, found.context)
    if isinstance(values, torch.Tensor):
        tensor = values.detach().to(torch_dtype(dtype) if dtype else values.dtype, copy=True)
    else:
        if dtype is None:
            dtype = values.dtype if isinstance(values, np.ndarray) else np.float32
        if isinstance(values, list | tuple):
            values = [one.asnumpy() if isinstance(one, NDArray) else one for one in values]
        tensor = torch.from_numpy(np.array(values, dtype=numpy_dtype(torch_dtype(dtype))))
    if not tensor.ndim and like is NDArray:
        tensor = tensor.reshape(1)
    return adopt(tensor, context, like)


def adopt(tensor: torch.Tensor, context: Context | None, like: type[NDArray]) -> Any:
    """Return an array over a tensor on the CPU that nothing else changes."""
    context = context or current_context()
    array = like(Chunk("values of the program", tensor), Spec.of(tensor), context)
    if context.device.is_accelerator:
        return like(array.chunk, array.spec, Context("cpu")).copyto(context)
    return array


def array_class() -> type[NDArray]:
    """Return the class of the arrays that loaders give."""
    return ndarray if runtime().uses_np else NDArray
