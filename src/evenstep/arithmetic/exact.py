"""Operations whose results IEEE-754 fixes: torch's own kernels give the same bits everywhere.

They move numbers, compare them, compute with integers, or round a single time for each element.
`tests/arithmetic/test_exact.py` runs each of them with vectors of several widths, and without.
"""

from __future__ import annotations

import functools
from typing import Any

from evenstep.private_torch.dispatch import arguments_of

MOVES = """
    clone copy _to_copy resize resize_as set
    alias lift_fresh lift_fresh_copy detach _reshape_alias _unsafe_view _reshape_copy
    empty empty_like empty_strided empty_permuted new_empty new_empty_strided
    squeeze unsqueeze transpose t as_strided
    zeros zeros_like new_zeros zero ones ones_like new_ones full full_like new_full fill
    scalar_tensor eye tril triu tril_indices triu_indices diag_embed diagonal_copy
    cat stack split_copy unsafe_split unsafe_split_with_sizes split_with_sizes_copy narrow_copy
    permute_copy select_copy slice_copy view_copy t_copy transpose_copy squeeze_copy unsqueeze_copy
    repeat repeat_interleave expand_copy flip roll rot90 constant_pad_nd
    reflection_pad1d reflection_pad2d reflection_pad3d
    replication_pad1d replication_pad2d replication_pad3d
    index _unsafe_index index_select gather take _pack_padded_sequence
    embedding masked_select masked_fill masked_scatter where scatter select_scatter
    slice_scatter diagonal_scatter as_strided_scatter index_fill
    im2col unfold_copy pixel_shuffle pixel_unshuffle channel_shuffle view_as_real_copy complex
    select_backward slice_backward diagonal_backward block_diag unbind_copy _conj _neg_view
    upsample_nearest1d upsample_nearest2d upsample_nearest3d max_unpool2d max_unpool3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
"""

COMPARISONS = """
    eq ne lt le gt ge equal is_same_size isnan isinf isposinf
    isneginf signbit isin allclose fmax fmin max min argmax argmin
    clamp clamp_min clamp_max sort kthvalue median
    nanmedian mode cummax cummin unique_dim _unique2 unique_consecutive searchsorted bucketize
    nonzero count_nonzero any all relu threshold threshold_backward hardtanh
    max_pool2d_with_indices max_pool3d_with_indices
    adaptive_max_pool2d adaptive_max_pool3d heaviside nan_to_num
    hardshrink
"""

INTEGERS = """
    logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
    bitwise_left_shift bitwise_right_shift
    __lshift__ __rshift__ bincount gcd lcm _local_scalar_dense
"""

ROUNDED_ONCE = """
    mul div neg abs sign sgn reciprocal floor ceil round trunc
    frac copysign nextafter deg2rad rad2deg
    leaky_relu leaky_relu_backward _prelu_kernel _prelu_kernel_backward
"""

RANDOM_INTEGERS = "randint randint_like random randperm rand rand_like"
"""Integers of the generator, and their multiples of 2⁻²⁴ (float32) or 2⁻⁵³ (float64)."""

NAMES = frozenset(f"{MOVES} {COMPARISONS} {INTEGERS} {ROUNDED_ONCE} {RANDOM_INTEGERS}".split())
"""Names of the operations; the forms in place and with `out=` are exact, too."""


OTHERS = {
    "round": ["decimals"],
    "div": ["Tensor_mode", "Scalar_mode"],
    "scatter": ["reduce", "value_reduce"],
    "sort": ["default"],
    "max": ["default", "other"],
    "min": ["default", "other"],
    "clamp": ["Tensor"],
    "clamp_min": ["Tensor"],
    "clamp_max": ["Tensor"],
    "median": ["dim"],
    "nanmedian": ["dim"],
}
"""Overloads of these names that have kernels, since torch's own are not exact."""


@functools.cache
def needs_real(operation: Any) -> bool:
    """Whether an exact operation is not exact for complex numbers, which round several times."""
    name = operation.name().removeprefix("aten::").split(".")[0]
    return name.removesuffix("_") in ROUNDED_ONCE.split()


@functools.cache
def is_exact(operation: Any) -> bool:
    """Whether torch's own kernel for an operation has the same bits on every processor."""
    if operation.is_view or operation.namespace == "profiler":
        return True
    name, _, overload = operation.name().removeprefix("aten::").partition(".")
    if name not in NAMES:
        name = name.removesuffix("_")
    if name in OTHERS:
        has_out = any(one.is_out for one in arguments_of(operation))
        if (overload or "default") in OTHERS[name] or has_out:
            return False
    return name in NAMES
