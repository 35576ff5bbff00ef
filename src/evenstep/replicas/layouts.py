"""Convolution weights in the channels-last layout while a trainer is open, and the user's again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def channels_last_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Lay weights of images out channels-last while the context is open; no value changes.

    Their gradients and optimizer state follow. A `state_dict` taken meanwhile has the layout that
    the user's weights had before, as the model and the optimizer have afterwards.
    """
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 4]
    before = {id(weight): weight.stride() for weight in weights}
    hooks = []
    for child in model.modules():
        owned = child.named_parameters(recurse=False)
        strides = {name: before[id(one)] for name, one in owned if id(one) in before}
        if strides:
            hooks.append(child.register_state_dict_post_hook(_OwnLayout(strides)))
    for weight in weights:
        last = torch.empty_like(weight, memory_format=torch.channels_last, device="meta")
        _lay_out(weight, optimizer, last.stride())
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for weight in weights:
            _lay_out(weight, optimizer, before[id(weight)])


class _OwnLayout:
    """Gives the weights in a module's state dict strides of their own."""

    def __init__(self, strides: Mapping[str, tuple[int, ...]]) -> None:
        self._strides = strides

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: object
    ) -> None:
        for name, strides in self._strides.items():
            value = state.get(prefix + name)
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                state[prefix + name] = _with_strides(value, strides)


def _lay_out(
    weight: nn.Parameter, optimizer: torch.optim.Optimizer, strides: tuple[int, ...]
) -> None:
    """Give a weight other strides, and its gradient and optimizer state where they had its own."""
    layout = weight.shape, weight.stride()
    if weight.grad is not None and weight.grad.layout == torch.strided:
        weight.grad = _with_strides(weight.grad, strides)
    state = optimizer.state.get(weight, {})
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and (value.shape, value.stride()) == layout:
            state[key] = _with_strides(value, strides)
    weight.data = _with_strides(weight.data, strides)


def _with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    if tensor.stride() == strides:
        return tensor
    same = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return same.copy_(tensor.detach())
