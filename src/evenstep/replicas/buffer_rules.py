"""How the values that shards leave in a buffer become its value after the step."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from evenstep.errors import InputError

JUDGE = "judge"
"""No rule is given: a number of which the mean makes no sense is refused."""


def buffer_rules(module: nn.Module, given: Mapping[str, str]) -> list[str]:
    """Return the rule of every buffer, in the order of `named_buffers`.

    Statistics of torch's own normalisation layers are averaged.

    Args:
        module: the model.
        given: rules by the buffers' names, which may be patterns such as "*.queue".

    Raises:
        InputError: no buffer has a given name.
    """
    names = [name for name, _ in module.named_buffers()]
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
    if isinstance(owner, _NormBase):
        return "first" if key == "num_batches_tracked" else "mean"
    if isinstance(owner, _SpectralNorm) or _has_old_spectral_norm(owner):
        return "mean"
    return JUDGE


def _has_old_spectral_norm(owner: nn.Module) -> bool:
    return any(isinstance(hook, SpectralNorm) for hook in owner._forward_pre_hooks.values())
