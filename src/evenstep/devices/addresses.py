"""Where parameters, buffers and optimizer state lie in memory: at multiples of 64 bytes.

Kernels may round a product by the addresses of what it reads: MKL's first compute the elements up
to a multiple of 64 bytes. New memory of torch begins there. Views of a flat vector, numpy arrays
and mapped files need not, and may lie elsewhere the next time.

Tensors are moved where nothing can notice it. Tensors whose memory something else holds too stay
where they are, so that no tie is cut; shards then compute on copies.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from evenstep.private_torch.tensors import USERS_OF_ONE, handle_of, is_view, memory_of, users_of

ALIGNMENT = 64  # bytes, of torch's allocations
PAGE = 4096  # bytes, of memory
_PLAIN = {torch.Tensor, nn.Parameter}
_ATOMS = {bool, int, float, str, type(None)}
_OF_TORCH = frozenset(nn.Module().__dict__)
address_of = torch.Tensor.data_ptr


def rounding(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """Return the dense tensors that products of them may round, each once: not integers."""
    distinct = {id(one): one for one in tensors if isinstance(one, torch.Tensor)}
    return [
        one
        for one in distinct.values()
        if (one.dtype.is_floating_point or one.dtype.is_complex)
        and one.layout is torch.strided
        and (type(one) in _PLAIN or not _has_no_memory(one))
    ]


def _has_no_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no data yet, or holds other tensors that have it."""
    return nn.parameter.is_lazy(tensor) or hasattr(tensor, "__tensor_flatten__")


def has_foreign_attributes(modules: Iterable[nn.Module]) -> bool:
    """Return whether a plain attribute of modules holds tensors in memory at a different address.

    Such memory is not torch's own. `copy.deepcopy` copies it to a multiple of 64 bytes.
    """
    held: list[Any] = []
    for child in modules:
        for key, value in vars(child).items():
            if type(value) in _ATOMS or key in _OF_TORCH:
                continue
            if isinstance(value, list | tuple | dict):
                held += value.values() if isinstance(value, dict) else value
            else:
                held.append(value)
    return any(one.untyped_storage().data_ptr() % ALIGNMENT for one in rounding(held))


def are_aligned(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether all tensors begin at multiples of 64 bytes."""
    return not functools.reduce(operator.or_, map(address_of, tensors), 0) % ALIGNMENT


def align(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Move tensors to multiples of 64 bytes, where nothing can notice it.

    Args:
        tensors: dense tensors, each once. Those that share memory with each other are moved if no
            other tensor shares it, and no two of them overlap.

    Returns:
        Those that stay elsewhere.
    """
    tensors, stay = [*tensors], list[torch.Tensor]()
    if are_aligned(tensors):
        return stay
    by_memory: dict[int, list[torch.Tensor]] = {}
    for one in tensors:
        by_memory.setdefault(memory_of(one), []).append(one)
    for own in by_memory.values():
        if are_aligned(own):
            continue
        if _are_alone(own):
            for one in own:
                one.data = copy_with_strides(one)
        else:
            stay += [one for one in own if not are_aligned([one])]
    return stay


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a copy of it that begins at a multiple of 64 bytes."""
    return tensor if are_aligned(rounding([tensor])) else copy_with_strides(tensor)


def align_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Give parameters aligned copies of gradients that don't begin at multiples of 64 bytes."""
    for one in parameters:
        if one.grad is not None:
            one.grad = aligned(one.grad)


def is_alone(tensor: torch.Tensor) -> bool:
    """Return whether nothing else holds the memory of a tensor."""
    return tensor.layout is torch.strided and _are_alone([tensor])


def _are_alone(own: Sequence[torch.Tensor]) -> bool:
    """Return whether nothing but these tensors holds the memory of them, and none overlap.

    Memory that torch has not allocated (a numpy array's, a mapped file's) may have any holders.
    """
    storage = own[0].untyped_storage()
    spans = sorted(map(_span, own))
    return (
        storage.resizable()
        and users_of(handle_of(storage)) == USERS_OF_ONE + len(own) - 1
        and not any(is_view(one) or one.is_inference() for one in own)
        and all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    )


def copy_with_strides(
    tensor: torch.Tensor, offset: int = 0, device: torch.device | None = None
) -> torch.Tensor:
    """Return a copy with the same strides: kernels may round by them, even where they leave gaps.

    Args:
        tensor: a dense tensor; an expanded one is copied as one.
        offset: the elements of its allocation before its first one.
        device: where the copy lies; None for where the tensor lies.
    """
    source = _in_memory(tensor)
    memory = source.new_empty(offset + _extent(source), device=device)
    return _copied(tensor, source, memory, offset)


def copy_in_page(tensor: torch.Tensor, begin: int) -> torch.Tensor:
    """Return such a copy, a view, that begins `begin` bytes behind a multiple of 4,096 bytes."""
    source = _in_memory(tensor)
    memory = source.new_empty(PAGE // source.itemsize + _extent(source))
    offset = (begin - memory.data_ptr()) % PAGE // source.itemsize
    memory.as_strided(source.shape, source.stride(), offset).copy_(source)
    return memory.as_strided(tensor.shape, tensor.stride(), offset)


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor in memory: an expanded one has fewer than it shows."""
    source = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        source = source.resolve_conj().resolve_neg()
    for dim, stride in enumerate(source.stride()):
        if stride == 0 and source.shape[dim] > 1:
            source = source.narrow(dim, 0, 1)
    return source


def _copied(
    tensor: torch.Tensor, source: torch.Tensor, memory: torch.Tensor, offset: int
) -> torch.Tensor:
    memory.as_strided(source.shape, source.stride(), offset).copy_(source)
    # Not a view: torch refuses to write to views that a function of autograd returns.
    return memory.new_empty(0).set_(memory.untyped_storage(), offset, tensor.shape, tensor.stride())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses between which a tensor lies."""
    begin = tensor.data_ptr()
    return begin, begin + _extent(tensor) * tensor.itemsize


def _extent(tensor: torch.Tensor) -> int:
    """Return how many elements lie from a tensor's first one to its last one in memory."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs) if tensor.numel() else 0


# ---- contents


def row_major(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` on the CPU and contiguous; a copy only if it isn't so already."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in row-major order as uint8 (bytes,), on the CPU."""
    plain = row_major(tensor)  # a lone element may have any stride, which `view` refuses
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
