"""Functions of neural networks: convolution, pooling, normalisation, activations, dropout.

Arguments have MXNet's names. Shapes are MXNet's: images (n, channels, height, width), the weight
of a dense layer (units, inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Size = int | Sequence[int]

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softrelu": functional.softplus,
    "softsign": functional.softsign,
}
_CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
_TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d}
_POOLS: dict[tuple[str, int], Callable[..., Tensor]] = {
    ("max", 1): functional.max_pool1d,
    ("max", 2): functional.max_pool2d,
    ("max", 3): functional.max_pool3d,
    ("avg", 1): functional.avg_pool1d,
    ("avg", 2): functional.avg_pool2d,
    ("avg", 3): functional.avg_pool3d,
}


def activation(data: Tensor, act_type: str) -> Tensor:
    """Return an activation by its name."""
    if act_type not in _ACTIVATIONS:
        raise ValueError(f"got activation {act_type!r}: use one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[act_type](data)


def fully_connected(
    data: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    num_hidden: int | None = None,
    no_bias: bool = False,
    flatten: bool = True,
) -> Tensor:
    """Return `data @ weight.T + bias`, of rows flattened to vectors if `flatten`."""
    rows = data.reshape(data.shape[0], -1) if flatten and data.ndim != 2 else data
    return functional.linear(rows, weight, None if no_bias else bias)


def convolution(
    data: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    kernel: Size | None = None,
    stride: Size = 1,
    dilate: Size = 1,
    pad: Size = 0,
    num_filter: int | None = None,
    num_group: int = 1,
    no_bias: bool = False,
) -> Tensor:
    """Return the convolution (cross-correlation) of images with `weight`."""
    convolve = _CONVOLUTIONS[data.ndim - 2]
    return convolve(data, weight, None if no_bias else bias, stride, pad, dilate, num_group)


def deconvolution(
    data: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    kernel: Size | None = None,
    stride: Size = 1,
    dilate: Size = 1,
    pad: Size = 0,
    adj: Size = 0,
    num_filter: int | None = None,
    num_group: int = 1,
    no_bias: bool = False,
) -> Tensor:
    """Return the transposed convolution of images with `weight`."""
    convolve = _TRANSPOSED[data.ndim - 2]
    return convolve(data, weight, None if no_bias else bias, stride, pad, adj, num_group, dilate)


def pooling(
    data: Tensor,
    kernel: Size = 1,
    pool_type: str = "max",
    global_pool: bool = False,
    pooling_convention: str = "valid",
    stride: Size | None = None,
    pad: Size = 0,
    count_include_pad: bool = True,
) -> Tensor:
    """Return maxima or means over windows, or over whole images with `global_pool`."""
    if pool_type not in ("max", "avg"):
        raise ValueError(f"got pool_type={pool_type!r}: use 'max' or 'avg'")
    if global_pool:
        dims = tuple(range(2, data.ndim))
        return (torch.amax if pool_type == "max" else torch.mean)(data, dims, True)
    options: dict[str, Any] = {"ceil_mode": pooling_convention == "full"}
    if pool_type == "avg":
        options["count_include_pad"] = count_include_pad
    steps = 1 if stride is None else stride
    return _POOLS[pool_type, data.ndim - 2](data, kernel, steps, pad, **options)


def batch_norm(
    data: Tensor,
    gamma: Tensor,
    beta: Tensor,
    moving_mean: Tensor,
    moving_var: Tensor,
    eps: float = 1e-3,
    momentum: float = 0.9,
    fix_gamma: bool = True,
    use_global_stats: bool = False,
    *,
    training: bool = False,
) -> Tensor:
    """Normalise the channels; during training with the batch's own statistics, which are recorded.

    The running variance is updated with the variance over n elements, as MXNet does (torch's own
    layer takes n - 1). With `fix_gamma`, the scale is 1.
    """
    gamma = torch.ones_like(gamma) if fix_gamma else gamma
    if not training or use_global_stats:
        return functional.batch_norm(data, moving_mean, moving_var, gamma, beta, eps=eps)
    with torch.no_grad():
        dims = [dim for dim in range(data.ndim) if dim != 1]
        variance, mean = torch.var_mean(data, dims, correction=0)
        moving_mean.mul_(momentum).add_(mean, alpha=1 - momentum)
        moving_var.mul_(momentum).add_(variance, alpha=1 - momentum)
    return functional.batch_norm(data, None, None, gamma, beta, training=True, eps=eps)


def layer_norm(
    data: Tensor, gamma: Tensor, beta: Tensor, axis: int = -1, eps: float = 1e-5
) -> Tensor:
    """Normalise along the last axis."""
    return functional.layer_norm(data, data.shape[axis:], gamma, beta, eps)


def dropout(
    data: Tensor,
    p: float = 0.5,
    *,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Set elements to 0 with probability `p` during training, and scale the others by 1/(1 - p)."""
    if not training or p == 0:
        return data.clone()
    kept = torch.empty_like(data).bernoulli_(1 - p, generator=generator)
    return data * kept / (1 - p)


def leaky_relu(
    data: Tensor, gamma: Tensor | None = None, act_type: str = "leaky", slope: float = 0.25
) -> Tensor:
    """Return the leaky ReLU, or another of its family."""
    if act_type == "prelu":
        assert gamma is not None
        return functional.prelu(data, gamma)
    family: dict[str, Callable[[Tensor], Tensor]] = {
        "leaky": lambda one: functional.leaky_relu(one, slope),
        "elu": lambda one: functional.elu(one, slope),
        "selu": functional.selu,
        "gelu": functional.gelu,
    }
    return family[act_type](data)


def softmax(data: Tensor, axis: int = -1, temperature: float | None = None) -> Tensor:
    """Return the softmax along an axis."""
    return torch.softmax(data if temperature is None else data / temperature, axis)


def log_softmax(data: Tensor, axis: int = -1, temperature: float | None = None) -> Tensor:
    """Return the logarithm of the softmax along an axis."""
    return torch.log_softmax(data if temperature is None else data / temperature, axis)


def embedding(
    data: Tensor,
    weight: Tensor,
    input_dim: int | None = None,
    output_dim: int | None = None,
    dtype: Any = None,
) -> Tensor:
    """Return the rows of `weight` whose numbers are in `data`."""
    return functional.embedding(data.long(), weight)


def l2_normalization(data: Tensor, eps: float = 1e-10) -> Tensor:
    """Divide each example by its Euclidean norm."""
    dims = tuple(range(1, data.ndim))
    return data / torch.sqrt((data * data).sum(dims, keepdim=True) + eps)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "activation": activation,
    "batch_norm": batch_norm,
    "convolution": convolution,
    "deconvolution": deconvolution,
    "dropout": dropout,
    "embedding": embedding,
    "fully_connected": fully_connected,
    "l2_normalization": l2_normalization,
    "layer_norm": layer_norm,
    "leaky_relu": leaky_relu,
    "log_softmax": log_softmax,
    "pooling": pooling,
    "softmax": softmax,
}
_ND_NAMES = {
    "Activation": "activation",
    "BatchNorm": "batch_norm",
    "Convolution": "convolution",
    "Deconvolution": "deconvolution",
    "Dropout": "dropout",
    "Embedding": "embedding",
    "FullyConnected": "fully_connected",
    "L2Normalization": "l2_normalization",
    "LayerNorm": "layer_norm",
    "LeakyReLU": "leaky_relu",
    "Pooling": "pooling",
    "log_softmax": "log_softmax",
    "softmax": "softmax",
}
ND: dict[str, Callable[..., Any]] = {name: FUNCTIONS[mine] for name, mine in _ND_NAMES.items()}
NPX: dict[str, Callable[..., Any]] = {**FUNCTIONS, "relu": torch.relu, "sigmoid": torch.sigmoid}
