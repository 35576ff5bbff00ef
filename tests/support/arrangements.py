"""The same tensor in several memory layouts."""

from __future__ import annotations

import torch


def arranged(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return tensors with the same values: dense, transposed, sliced of a larger one, and so on."""
    axes = list(range(tensor.ndim))[::-1]
    larger = torch.full([2 * size + 1 for size in tensor.shape], torch.nan).to(tensor.dtype)
    sliced = larger[tuple(slice(1, None, 2) for _ in tensor.shape)]
    result = [tensor.contiguous(), tensor.permute(axes).contiguous().permute(axes)]
    result.append(sliced.copy_(tensor))
    if tensor.ndim in (4, 5):
        layout = torch.channels_last if tensor.ndim == 4 else torch.channels_last_3d
        result.append(tensor.contiguous(memory_format=layout))
    assert all(one.shape == tensor.shape for one in result)
    return result
