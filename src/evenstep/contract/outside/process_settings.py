"""Settings of the process and of threads, with which some shards would be computed and others not.

A shard that changes a setting of the process changes it for the other lanes, too; a mode of torch
in the user's thread does not reach the lanes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from evenstep.arithmetic import is_portable, is_portable_here
from evenstep.devices.accelerator import autocast_kinds
from evenstep.devices.arithmetic import CALL, READS, torch_settings
from evenstep.devices.forward_mode import refuse_inside_a_level
from evenstep.errors import ContractError
from evenstep.limits import Arithmetic
from evenstep.private_torch.compilers import cudnn_benchmarks, cudnn_is_deterministic, uses_cudnn
from evenstep.private_torch.dispatch import DeviceContext, OpsMode, dispatch_modes, function_modes
from evenstep.private_torch.graph import saving_hooks
from evenstep.private_torch.modules import parametrizations_are_cached

_THREADS = "the number of intra-op threads"
_CASTS = "autocast's cache of cast weights"
_PARAMETRIZED = "the cache of torch.nn.utils.parametrize.cached()"

_ADVICE = {
    _THREADS: "give Experiment(threads=...)",
    _CASTS: "create torch.autocast(..., cache_enabled=False) in forward or in the objective",
    _PARAMETRIZED: "keep the weight in a variable of forward instead",
}
_SET_ONCE = "set it once in the program, before the trainer is opened"


class ProcessSettings(OpsMode):
    """Inside `with`, notes the first setting of the process that is changed while an op runs.

    A context manager such as `torch.nn.attention.sdpa_kernel` changes it for all threads. So which
    kernels another lane's shard uses would depend on timing, and two that overlap may leave the
    setting changed for good.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before = _settings()
        self._known = [[*map(CALL, _READS)]]  # what was read of settings that are the same
        self._changed = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one op, and look at the settings that it runs with."""
        if [*map(CALL, _READS)] not in self._known:
            self._look()
        return func(*args, **kwargs) if kwargs else func(*args)

    def refuse_changed(self) -> None:
        """Refuse the shard if it has changed a setting, for an op or for good."""
        self._look()
        if self._changed:
            now, before = _settings()[self._changed], self._before[self._changed]
            if now != before and self._changed == _THREADS:  # this lane's own
                torch.set_num_threads(int(before))
            left = f" and left it at {now} instead of {before}" if now != before else ""
            raise ContractError(
                f"forward or the objective changes {self._changed}{left}, but shards that other "
                f"threads compute at the same time use it too: "
                f"{_ADVICE.get(self._changed, _SET_ONCE)}"
            )

    def _look(self) -> None:
        if self._changed:
            return
        now = _settings()
        self._changed = next((name for name in now if now[name] != self._before[name]), "")
        if not self._changed:
            self._known.append([*map(CALL, _READS)])


def _settings() -> dict[str, str]:
    """Return the settings by name, for a message."""
    casts = any(map(torch.is_autocast_enabled, autocast_kinds()))
    return {
        **torch_settings(),
        "torch.backends.cudnn": str(tuple(map(CALL, _OF_CUDNN))),
        _THREADS: str(torch.get_num_threads()),
        _CASTS: str(casts and torch.is_autocast_cache_enabled()),
        _PARAMETRIZED: str(parametrizations_are_cached()),
    }


_OF_CUDNN = (uses_cudnn, cudnn_benchmarks, cudnn_is_deterministic)
_READS = (
    *READS,
    *(*_OF_CUDNN, torch.get_num_threads, torch.is_autocast_cache_enabled),
    *(functools.partial(torch.is_autocast_enabled, kind) for kind in autocast_kinds()),
    functools.partial(parametrizations_are_cached),
)


def refuse_modes(device: torch.device, arithmetic: Arithmetic = "torch") -> None:
    """Refuse the modes of the calling thread, except a default device like `device`.

    Portable arithmetic is refused only where the lanes don't compute in it.

    Raises:
        ContractError: names the first of them.
    """
    refuse_inside_a_level("a step")
    modes = [*function_modes(), *dispatch_modes()]
    if is_portable_here() and arithmetic == "torch":
        raise ContractError(
            "a step inside `with evenstep.portable()` must be portable, too: give the trainer "
            'experiment=Experiment(arithmetic="portable")'
        )
    names = [
        f"the mode {type(mode).__name__}"
        for mode in modes
        if not (isinstance(mode, DeviceContext) and mode.device.type == device.type)
        and not is_portable(mode)
    ]
    if saving_hooks(False):
        names.append("torch.autograd.graph.saved_tensors_hooks")
    if names:
        raise ContractError(
            f"{names[0]} is active around a step, but torch applies it to the calling thread only, "
            f"and shards are computed in worker threads: enter it inside the objective or the "
            f"model's forward"
        )
