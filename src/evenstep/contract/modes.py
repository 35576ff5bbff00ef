"""Refuses modes of torch around a step, which would not reach the devices' threads."""

from __future__ import annotations

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from evenstep.errors import ContractError


def refuse_modes(device: torch.device) -> None:
    """Refuse the modes of the calling thread, except a default device like `device`.

    Raises:
        ContractError: names the first of them.
    """
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    names = [
        f"the mode {type(mode).__name__}"
        for mode in modes
        if not (isinstance(mode, DeviceContext) and mode.device.type == device.type)
    ]
    if _top_saved_tensors_default_hooks(False):
        names.append("torch.autograd.graph.saved_tensors_hooks")
    if names:
        raise ContractError(
            f"{names[0]} is active around a step, but torch applies it to the calling thread only, "
            f"and shards are computed in worker threads: enter it inside the objective or the "
            f"model's forward"
        )
