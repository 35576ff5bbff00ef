"""Arguments for the operations that are claimed to be exact, where their names don't say enough.

A case is a function of two tensors of one shape and type: it returns lists of arguments. It may
raise for shapes and types that the operation doesn't take.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Case = Callable[[torch.Tensor, torch.Tensor], list[list[Any]]]

F32 = torch.float32
SCALARS = (0.5, -3, 0.0, -0.0, 1e-40, math.inf, math.nan)


def whole(x: torch.Tensor, below: int) -> torch.Tensor:
    """Return an integer in [0, below) for each element."""
    return (torch.arange(x.numel()) * 7919 % 10007 % max(below, 1)).reshape(x.shape)


def places(x: torch.Tensor, count: int = 5) -> torch.Tensor:
    """Return valid places along the first dimension, with repetitions."""
    return torch.arange(count) * 3 % len(x)


def first(x: torch.Tensor) -> list[int]:
    return list(x.shape)


def bounds(x: torch.Tensor, y: torch.Tensor) -> list[list[Any]]:
    return [
        [x, -0.5, 0.25],
        [x, None, 0.0],
        [x, -0.0, None],
        [x, 0.0, math.inf],
        [x, math.nan, 1.0],
    ]


def sizes(x: torch.Tensor, y: torch.Tensor) -> list[list[Any]]:
    return [[first(x)]]


def of_size(x: torch.Tensor, y: torch.Tensor) -> list[list[Any]]:
    return [[x, first(x)]]


def dims(x: torch.Tensor, y: torch.Tensor) -> list[list[Any]]:
    return [[x, 0], [x, -1], [x, 0, True]]


def pooled(x: torch.Tensor, y: torch.Tensor) -> list[list[Any]]:
    return [[x, [2, 2]], [x, [3, 3], [2, 1], [1, 1], [1, 1], True], [x, [3, 2], [1, 2], 0, [1, 3]]]


def in_space(*rest: list[Any]) -> Case:
    """Return a case for images: of single channels, with one more dimension, and as they are."""

    def case(x: torch.Tensor, y: torch.Tensor) -> list[list[Any]]:
        return [[x, *one] for one in rest]

    return case


def volumes(case: Case) -> Case:
    """Turn images into volumes for a case."""
    return lambda x, y: case(x.unflatten(1, (1, -1)), y.unflatten(1, (1, -1)))


def pooled_volumes(x: torch.Tensor, y: torch.Tensor) -> list[list[Any]]:
    return [[x, [2, 2, 2]], [x, [3, 3, 3], [2, 1, 2], [1, 1, 1], [1, 1, 1], True]]


CASES: dict[str, Case] = {
    # ---- moves
    "copy": lambda x, y: [[x, y]],
    "_to_copy": lambda x, y: [[x]],
    "resize": of_size,
    "resize_as": lambda x, y: [[x, y]],
    "set.source_Storage": lambda x, y: [[x, y.untyped_storage()]],
    "set.source_Storage_storage_offset": lambda x, y: [
        [x, y.untyped_storage(), 0, first(y), list(y.stride())]
    ],
    "set.source_Tensor_storage_offset": lambda x, y: [[x, y, 0, first(y), list(y.stride())]],
    "transpose": lambda x, y: [[x, 0, -1]],
    "squeeze.dims": lambda x, y: [[x.unsqueeze(0), [0]]],
    "as_strided": lambda x, y: [[x, first(x)[:1], [1]]],
    "transpose_copy.int": lambda x, y: [[x, 0, -1]],
    "repeat_interleave.self_int": lambda x, y: [[x, 2]],
    "set.source_Tensor": lambda x, y: [[x, y]],
    "_reshape_alias": lambda x, y: [[x, first(x), list(x.stride())]],
    "_unsafe_view": lambda x, y: [[x, [-1]]],
    "_reshape_copy": lambda x, y: [[x, [-1]]],
    "empty_strided": lambda x, y: [[first(x), list(x.stride())]],
    "empty_permuted": lambda x, y: [[first(x), list(range(x.ndim))[::-1]]],
    "new_empty_strided": lambda x, y: [[x, first(x), list(x.stride())]],
    "full": lambda x, y: [[first(x), s] for s in SCALARS],
    "new_full": lambda x, y: [[x, first(x), s] for s in SCALARS],
    "eye": lambda x, y: [[x.shape[-1]]],
    "eye.m": lambda x, y: [[x.shape[-1], 3]],
    "arange": lambda x, y: [[len(x)]],
    "arange.start": lambda x, y: [[-3, len(x)]],
    "arange.start_step": lambda x, y: [[len(x), -3, -2]],
    "tril": lambda x, y: [[x], [x, 1], [x, -2]],
    "triu": lambda x, y: [[x], [x, 1], [x, -2]],
    "tril_indices": lambda x, y: [[len(x), 7, 1]],
    "triu_indices": lambda x, y: [[len(x), 7, 1]],
    "diagonal_backward": lambda x, y: [[x[0], [x.shape[-1]] * 2, 0, 0, 1]],
    "diagonal_scatter": lambda x, y: [[x, torch.diagonal(y)]],
    "cat": lambda x, y: [[[x, y, x]], [[x, y], -1]],
    "_chunk_cat": lambda x, y: [[[x, y], 0, 2]],
    "split_copy.Tensor": lambda x, y: [[x, 2]],
    "unsafe_split.Tensor": lambda x, y: [[x, 2]],
    "split_with_sizes_copy": lambda x, y: [[x, [1, len(x) - 1]]],
    "unsafe_split_with_sizes": lambda x, y: [[x, [1, len(x) - 1]]],
    "slice_copy.Tensor": lambda x, y: [[x, 0, 1, None, 2]],
    "narrow_copy": lambda x, y: [[x, -1, 1, x.shape[-1] // 2]],
    "permute_copy": lambda x, y: [[x, list(range(x.ndim))[::-1]]],
    "select_copy.int": lambda x, y: [[x, -1, 0]],
    "view_copy": lambda x, y: [[x, [-1]]],
    "fill.Tensor": lambda x, y: [[x, y.flatten()[0]]],
    "masked_fill.Tensor": lambda x, y: [[x, y > 0, y.flatten()[0]]],
    "scalar_tensor": lambda x, y: [[s] for s in SCALARS],
    "squeeze_copy.dims": lambda x, y: [[x.unsqueeze(0), [0]]],
    "view_copy.dtype": lambda x, y: [[x, torch.uint8]],
    "repeat": lambda x, y: [[x, [2] * x.ndim]],
    "repeat_interleave.Tensor": lambda x, y: [[whole(x, 4)]],
    "expand_copy": lambda x, y: [[x, [3, *x.shape]]],
    "flip": lambda x, y: [[x, [0]], [x, [-1]], [x, list(range(x.ndim))]],
    "roll": lambda x, y: [[x, [3]], [x, [2], [-1]]],
    "rot90": lambda x, y: [[x, 1, [0, 1]]],
    "constant_pad_nd": lambda x, y: [[x, [1, 2], s] for s in SCALARS],
    "reflection_pad1d": in_space([[1, 2]]),
    "replication_pad1d": in_space([[1, 2]]),
    "reflection_pad2d": in_space([[1, 2, 2, 0]]),
    "replication_pad2d": in_space([[1, 2, 2, 0]]),
    "reflection_pad3d": volumes(in_space([[1, 2, 2, 0, 1, 1]])),
    "replication_pad3d": volumes(in_space([[1, 2, 2, 0, 1, 1]])),
    "index.Tensor": lambda x, y: [[x, [places(x)]], [x, [y > 0]], [x, [None, places(x.t())]]],
    "_unsafe_index.Tensor": lambda x, y: [[x, [places(x)]], [x, [None, places(x.t())]]],
    "_pack_padded_sequence": lambda x, y: [
        [x.view(len(x), -1, 1), torch.tensor([len(x)] * (x.numel() // len(x))), False]
    ],
    "index_select": lambda x, y: [[x, 0, places(x)], [x, -1, places(x.transpose(0, -1))]],
    "gather": lambda x, y: [[x, -1, whole(x, x.shape[-1])], [x, 0, whole(x[1:], len(x))]],
    "take": lambda x, y: [[x, whole(x, x.numel())]],
    "embedding": lambda x, y: [[x.view(-1, x.shape[-1]), places(x)]],
    "masked_scatter": lambda x, y: [[x, y > 0, y]],
    "scatter.src": lambda x, y: [[x, -1, whole(x, x.shape[-1]), y], [x, 0, whole(x, len(x)), y]],
    "scatter.value": lambda x, y: [[x, -1, whole(x, x.shape[-1]), s] for s in SCALARS],
    "select_scatter": lambda x, y: [[x, y.select(-1, 0), -1, 1]],
    "slice_scatter": lambda x, y: [[x, y[1:], 0, 1]],
    "as_strided_scatter": lambda x, y: [[x, y[:3], first(y[:3]), list(y.stride())]],
    "index_fill.int_Scalar": lambda x, y: [[x, 0, places(x), s] for s in SCALARS],
    "index_fill.int_Tensor": lambda x, y: [[x, 0, places(x), y.flatten()[0]]],
    "im2col": in_space([[3, 2], [1, 1], [1, 0], [2, 1]]),
    "unfold_copy": lambda x, y: [[x, -1, 3, 2]],
    "pixel_shuffle": lambda x, y: [[x[:, :16], 4]],
    "pixel_unshuffle": lambda x, y: [[x[..., :4, :6], 2]],
    "channel_shuffle": lambda x, y: [[x[:, :18], 3]],
    "view_as_real_copy": lambda x, y: [[torch.complex(x, y)]],
    "_conj": lambda x, y: [[torch.complex(x, y)]],
    "block_diag": lambda x, y: [[[x, y]]],
    "select_backward": lambda x, y: [[x, [3, *x.shape], 0, 1]],
    "slice_backward": lambda x, y: [[x, [2 * len(x), *x.shape[1:]], 0, 1, 2 * len(x), 2]],
    "unfold_copy.default": lambda x, y: [[x, -1, 3, 2]],
    "upsample_nearest1d": lambda x, y: [[x[0], [17]], [x[0], [3], 0.4]],
    "_upsample_nearest_exact1d": lambda x, y: [[x[0], [17]], [x[0], [3], 0.4]],
    "upsample_nearest2d": in_space([[10, 14]], [[3, 11]], [[3, 11], 0.7, 1.6]),
    "_upsample_nearest_exact2d": in_space([[10, 14]], [[3, 11]], [[3, 11], 0.7, 1.6]),
    "upsample_nearest3d": volumes(in_space([[10, 14, 5]], [[3, 11, 4]])),
    "_upsample_nearest_exact3d": volumes(in_space([[10, 14, 5]], [[3, 11, 4]])),
    **{
        f"{kind}{ndim}d.vec": (volumes(in_space(one)) if ndim == 3 else in_space(one))
        for kind in ("upsample_nearest", "_upsample_nearest_exact")
        for ndim, one in ((2, [None, [1.7, 0.6]]), (3, [None, [1.7, 0.6, 2.0]]))
    },
    "upsample_nearest1d.vec": lambda x, y: [[x[0], None, [1.7]]],
    "_upsample_nearest_exact1d.vec": lambda x, y: [[x[0], None, [1.7]]],
    # ---- comparisons
    "isin.Tensor_Tensor": lambda x, y: [[x, y[:3]], [x, y.flatten().repeat(3)]],
    "clamp": bounds,
    "hardtanh": lambda x, y: [[x], [x, -0.0, 6.0]],
    "leaky_relu": lambda x, y: [[x], [x, 0.3], [x, -0.0]],
    "leaky_relu_backward": lambda x, y: [[x, y, 0.3, False], [x, y, 0.3, True]],
    "threshold": lambda x, y: [[x, 0.1, s] for s in SCALARS],
    "threshold_backward": lambda x, y: [[x, y, 0], [x, y, 0.5]],
    "argmax": lambda x, y: [[x], [x, 0], [x, -1]],
    "argmin": lambda x, y: [[x], [x, 0], [x, -1]],
    "any.dims": lambda x, y: [[x, [0, -1]]],
    "all.dims": lambda x, y: [[x, [0, -1]]],
    "count_nonzero.dim_IntList": lambda x, y: [[x, [0]]],
    "sort": lambda x, y: [[x], [x, 0], [x, -1, True]],
    "sort.stable": lambda x, y: [[x], [x, True, 0], [x, True, -1, True]],
    "kthvalue": lambda x, y: [[x, 1], [x, len(x) // 2 + 1, 0]],
    "unique_dim": lambda x, y: [[x, 0, True, True, True]],
    "_unique2": lambda x, y: [[x, True, True, True]],
    "unique_consecutive": lambda x, y: [[x, True, True]],
    "searchsorted.Tensor": lambda x, y: [[x.nan_to_num().sort(-1)[0], y]],
    "searchsorted.Scalar": lambda x, y: [
        [x.flatten().nan_to_num().sort(-1)[0], s] for s in (0, 0.5)
    ],
    "bucketize.Tensor": lambda x, y: [[y, x.nan_to_num().flatten().sort(-1)[0]]],
    "bucketize.Scalar": lambda x, y: [[s, x.nan_to_num().flatten().sort(-1)[0]] for s in (0, 0.5)],
    "max_pool2d_with_indices": pooled,
    "max_pool3d_with_indices": volumes(pooled_volumes),
    "adaptive_max_pool2d": in_space([[3, 2]], [[1, 1]], [[5, 7]]),
    "adaptive_max_pool3d": volumes(in_space([[3, 2, 4]])),
    "max_unpool2d": lambda x, y: [
        [*torch.ops.aten.max_pool2d_with_indices(x.contiguous(), [2, 2]), first(x)[-2:]]
    ],
    "max_unpool3d": lambda x, y: [
        [
            *torch.ops.aten.max_pool3d_with_indices(x[:, :, None], [1, 2, 2]),
            [1, *first(x)[-2:]],
            [1, 2, 2],
            [0, 0, 0],
        ]
    ],
    "nan_to_num": lambda x, y: [[x], [x, 0.1, 2.0, -3.0]],
    # ---- integers, single roundings
    "bincount": lambda x, y: [[whole(x, 9).flatten()]],
    "__lshift__.Scalar": lambda x, y: [[x, 3]],
    "__rshift__.Scalar": lambda x, y: [[x, 3]],
    "__lshift__.Tensor": lambda x, y: [[x, whole(x, 5)]],
    "__rshift__.Tensor": lambda x, y: [[x, whole(x, 5)]],
    "bitwise_left_shift.Tensor": lambda x, y: [[x, whole(x, 5)]],
    "bitwise_right_shift.Tensor": lambda x, y: [[x, whole(x, 5)]],
    "bitwise_left_shift.Tensor_Scalar": lambda x, y: [[x, 3]],
    "bitwise_right_shift.Tensor_Scalar": lambda x, y: [[x, 3]],
    "bitwise_left_shift.Scalar_Tensor": lambda x, y: [[3, whole(x, 5)]],
    "bitwise_right_shift.Scalar_Tensor": lambda x, y: [[3, whole(x, 5)]],
    "_local_scalar_dense": lambda x, y: [[x.flatten()[2]]],
    # ---- integers of the generator
    "randint": lambda x, y: [[100, first(x)]],
    "randint.low": lambda x, y: [[-(2**40), 2**40, first(x)]],
    "randint_like": lambda x, y: [[x, 50]],
    "randint_like.low_dtype": lambda x, y: [[x, -5, 50]],
    "randint.low_generator": lambda x, y: [[-5, 50, first(x)]],
    "randint_like.Tensor": lambda x, y: [[x, torch.tensor(50)]],
    "randint_like.Tensor_generator": lambda x, y: [[x, torch.tensor(50)]],
    "randint_like.low_generator_dtype": lambda x, y: [[x, -5, 50]],
    "random": lambda x, y: [[x]],
    "random.from": lambda x, y: [[x, 0, 2]],
    "random.to": lambda x, y: [[x, 2]],
    "randperm": lambda x, y: [[len(x)]],
    "rand": sizes,
}
"""Positional arguments, by the name of an operation or of one of its overloads."""

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "_to_copy": [{"dtype": kind} for kind in (F32, torch.float64, torch.bfloat16, torch.float16)],
    "div.Scalar_mode": [{"rounding_mode": mode} for mode in ("floor", "trunc", None)],
    "div.Tensor_mode": [{"rounding_mode": mode} for mode in ("trunc", None)],
    "sort.stable": [{"stable": True}],
}
"""Keyword arguments, likewise."""
