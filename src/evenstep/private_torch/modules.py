"""Modules and parameters: their hooks, their parts, and the bases of torch's layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from evenstep.private_torch.names import attribute, private

_HOOKS = "see which hooks the model has"
_PARTS = "see which parts of the model were replaced"
_MODULE = nn.Module()
_PARAMETER = nn.Parameter(torch.empty(1, device="cpu"))

Parts = Callable[[Any], dict[Any, Any]]

forward_hooks: Parts = attribute(_MODULE, "_forward_hooks", _HOOKS)
forward_pre_hooks: Parts = attribute(_MODULE, "_forward_pre_hooks", _HOOKS)
backward_hooks: Parts = attribute(_MODULE, "_backward_hooks", _HOOKS)
backward_pre_hooks: Parts = attribute(_MODULE, "_backward_pre_hooks", _HOOKS)

own_modules: Parts = attribute(_MODULE, "_modules", _PARTS)
own_parameters: Parts = attribute(_MODULE, "_parameters", _PARTS)
own_buffers: Parts = attribute(_MODULE, "_buffers", _PARTS)

ANY_HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks"
"""The same, for `getattr`: torch.compile can't trace the functions above."""

MaybeHooks = Callable[[torch.Tensor], "dict[int, Callable[..., Any]] | None"]

gradient_hooks: MaybeHooks = attribute(_PARAMETER, "_backward_hooks", _HOOKS)
"""Return the hooks that a parameter's gradient passes, or None."""

sum_hooks: MaybeHooks = attribute(_PARAMETER, "_post_accumulate_grad_hooks", _HOOKS)
"""Return the hooks that are called when a parameter's gradient was accumulated, or None."""

_compiled_call = attribute(_MODULE, "_compiled_call_impl", "refuse layers that the user compiled")


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks on its backward pass."""
    return bool(backward_hooks(module) or backward_pre_hooks(module))


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks on its forward pass."""
    return bool(forward_hooks(module) or forward_pre_hooks(module))


def is_compiled(module: nn.Module) -> bool:
    """Return whether the user has compiled a module, by `torch.compile` or its own `compile`."""
    return _compiled_call(module) is not None or hasattr(module, "_torchdynamo_orig_callable")


# ---- torch's layers; where a base is missing, the public layers that are made of it

BatchNorm: Any = private(
    "torch.nn.modules.batchnorm",
    "_BatchNorm",
    "know layers that average over examples",
    public_way=(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
)
NormWithStatistics: Any = private(
    "torch.nn.modules.batchnorm",
    "_NormBase",
    "know buffers that are averages",
    public_way=(
        *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
        *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    ),
)
Dropout: Any = private(
    "torch.nn.modules.dropout",
    "_DropoutNd",
    "know layers that compute something else in evaluation",
    public_way=(
        *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
        *(nn.AlphaDropout, nn.FeatureAlphaDropout),
    ),
)
ParametrizedSpectralNorm: Any = private(
    "torch.nn.utils.parametrizations", "_SpectralNorm", "know buffers that are averages"
)


# ---- torch.nn.utils.parametrize.cached()

_cache = attribute(parametrize, "_cache_enabled", "refuse parametrize.cached() inside a shard")


parametrizations_are_cached: Callable[[], Any] = functools.partial(_cache, parametrize)
"""Return something true if any thread is inside `torch.nn.utils.parametrize.cached()`."""
