"""Finds convolutions whose gradients are wrong if images are channels-last in memory."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from evenstep.errors import InputError
from evenstep.options.experiment import Experiment
from evenstep.replicas.checks import Members

_FEW_CHANNELS = 16  # oneDNN's block of channels for AVX-512; 8 for AVX2


def with_safe_format(experiment: Experiment, members: Members) -> Experiment:
    """Return the experiment with contiguous images if channels-last is not safe for the model.

    For channels-last images, oneDNN computes the weight gradient of a 1×1 convolution with a stride
    above 1 and fewer input channels than a block in too small a workspace: the gradient is wrong,
    or the process crashes (https://github.com/uxlfoundation/oneDNN/issues/6035).

    Raises:
        InputError: `experiment` asks for channels-last, or a weight of such a convolution is
            channels-last, which makes torch convert its images.
    """
    unsafe = [name for name, child in members.modules if _is_unsafe(child)]
    if not unsafe:
        return experiment
    reason = (
        f"module {unsafe[0]!r} is a 1×1 convolution with a stride above 1 and fewer than "
        f"{_FEW_CHANNELS} input channels, whose gradients are wrong, or crash the process, for "
        "channels-last images (https://github.com/uxlfoundation/oneDNN/issues/6035)"
    )
    if experiment.memory_format == "channels_last":
        raise InputError(f"got memory_format='channels_last', but {reason}: leave it out")
    for name, weight in members.parameters:
        if _is_channels_last(weight):
            raise InputError(
                f"parameter {name!r} is channels-last in memory, but {reason}: call "
                "model.to(memory_format=torch.contiguous_format)"
            )
    return dataclasses.replace(experiment, memory_format="contiguous")


def _is_unsafe(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.Conv2d)
        and module.kernel_size == (1, 1)
        and max(module.stride) > 1
        and module.in_channels // module.groups < _FEW_CHANNELS
    )


def _is_channels_last(weight: torch.Tensor) -> bool:
    """Whether torch computes a weight channels-last (`is_contiguous` is vague for 1×1)."""
    if weight.ndim != 4:
        return False
    channels, height, width = weight.shape[1:]
    strides = weight.stride()[1:]
    return strides == (1, width * channels, channels) != (height * width, width, 1)
