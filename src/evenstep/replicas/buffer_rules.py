"""How the values that shards leave in a buffer become its value after the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.ao.quantization.fake_quantize import FakeQuantizeBase
from torch.ao.quantization.observer import MinMaxObserver, PerChannelMinMaxObserver
from torch.nn.utils.spectral_norm import SpectralNorm

from evenstep.errors import InputError
from evenstep.private_torch.modules import (
    NormWithStatistics,
    ParametrizedSpectralNorm,
    forward_pre_hooks,
)

JUDGE = "judge"
"""No rule is given: a number of which the mean makes no sense is refused."""

RANGE = "range"
"""Scale and zero point of a quantiser: computed from the range that its observer has in the end."""

_OF_OBSERVERS = {"min_val": "min", "max_val": "max"}


def buffer_rules(module: nn.Module, names: Sequence[str], given: Mapping[str, str]) -> list[str]:
    """Return the rule of every buffer, in the order of `named_buffers`.

    Statistics of torch's own normalisation layers are averaged; the ranges that its observers have
    seen in the shards are joined, as if they had seen the whole batch.

    Args:
        module: the model.
        names: the names of its buffers.
        given: rules by the buffers' names, which may be patterns such as "*.queue".

    Raises:
        InputError: no buffer has a given name.
    """
    for pattern in given:
        if not any(fnmatchcase(name, pattern) for name in names):
            has = f"it has {', '.join(names[:5])}" if names else "it has none"
            raise InputError(
                f"got buffers={{{pattern!r}: ...}}, but the model has no such buffer: {has}"
            )
    return [_rule_of(module, name, given) for name in names]


def _rule_of(module: nn.Module, name: str, given: Mapping[str, str]) -> str:
    for pattern, rule in given.items():
        if fnmatchcase(name, pattern):
            return rule
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    if isinstance(owner, NormWithStatistics):
        return "first" if key == "num_batches_tracked" else "mean"
    if isinstance(owner, ParametrizedSpectralNorm) or _has_old_spectral_norm(owner):
        return "mean"
    if isinstance(owner, MinMaxObserver | PerChannelMinMaxObserver) and key in _OF_OBSERVERS:
        return _OF_OBSERVERS[key]
    if _has_range(owner) and key in ("scale", "zero_point"):
        return RANGE
    return JUDGE


def _has_old_spectral_norm(owner: nn.Module) -> bool:
    return any(isinstance(hook, SpectralNorm) for hook in forward_pre_hooks(owner).values())


def _has_range(owner: nn.Module) -> bool:
    """Whether a layer quantises by a range that an observer of torch's has seen."""
    observer = getattr(owner, "activation_post_process", None)
    is_known = isinstance(observer, MinMaxObserver | PerChannelMinMaxObserver)
    return isinstance(owner, FakeQuantizeBase) and is_known


def ranges_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name, with a dot behind it, and the observer of each layer that quantises by it."""
    for name, child in module.named_modules():
        if _has_range(child):
            yield f"{name}." if name else "", child.activation_post_process


def switches_of_observers(module: nn.Module) -> set[str]:
    """Return the names of the buffers that say whether a layer observes the range it quantises."""
    return {
        f"{name}.observer_enabled" if name else "observer_enabled"
        for name, child in module.named_modules()
        if isinstance(child, FakeQuantizeBase)
    }
