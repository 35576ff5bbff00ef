"""torch's compilers: TorchScript's interpreter, Dynamo, Inductor, and forward-mode AD's levels."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from evenstep.private_torch.names import attribute, private, when_called

_INTERPRETED = "interpret functions of torch.jit.script, which round differently when compiled"

scripts_are_compiled: Callable[[], bool] = private(
    "torch._C", "_get_graph_executor_optimize", _INTERPRETED
)
"""Return whether the calling thread compiles functions of TorchScript."""

compile_scripts: Callable[[bool], None] = private(
    "torch._C", "_set_graph_executor_optimize", _INTERPRETED
)
"""Set whether the calling thread compiles them."""


# ---- torch.compile; these modules take seconds to import

_SHARDS = "compile shards"

dynamo_settings: Callable[[], Any] = when_called("torch._dynamo", "config", _SHARDS)
inductor_settings: Callable[[], Any] = when_called("torch._inductor", "config", _SHARDS)
inductor: Callable[[], Callable[..., Any]] = when_called(
    "torch._inductor.compile_fx", "compile_fx", _SHARDS
)
"""Return the function that compiles a graph, given example inputs."""

pick_vectors: Callable[[], Callable[[], object]] = when_called(
    "torch._inductor.cpu_vec_isa", "pick_vec_isa", "keep compiled files of each processor apart"
)

compile_ahead: Callable[[], Callable[..., str]] = when_called(
    "torch._inductor", "aoti_compile_and_package", "compile a model ahead of time"
)
load_compiled: Callable[[], Callable[..., Any]] = when_called(
    "torch._inductor", "aoti_load_package", "compile a model ahead of time"
)

_lock: Callable[[], Any] = when_called(
    "torch._dynamo.convert_frame", "compile_lock", "update while nothing compiles", needed=True
)


def lock_of_compiler() -> contextlib.AbstractContextManager[object] | None:
    """Return the lock that torch holds while it compiles; None if nothing was compiled yet.

    While one thread compiles, optimizers in all threads take the arithmetic that can be compiled
    (Adam corrects its bias in a different order): torch's flag for it belongs to the process.
    """
    if "torch._dynamo.convert_frame" not in sys.modules:
        return None
    lock: contextlib.AbstractContextManager[object] = _lock()
    return lock


# ---- levels of forward-mode AD (torch.func.jvp, dual_level)

_LEVELS = "let one thread at a time enter a level of forward-mode AD"

level_of = attribute(forward_ad, "_current_level", _LEVELS)
"""Return the level that any thread is inside, given `torch.autograd.forward_ad`; -1 for none."""

transforms: Any = private("torch._functorch", "eager_transforms", _LEVELS)
"""The module in which `torch.func`'s transforms look up how they enter and leave a level."""


# ---- settings


def _setting(name: str, public_way: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function in C: one in Python takes ten times as long, and more under a profiler."""
    purpose = "compare settings of the process, at each op of the first check"
    found: Callable[..., Any] = private("torch._C", name, purpose, public_way=public_way)
    return found


uses_nnpack = _setting("_get_nnpack_enabled", lambda: True)
is_deterministic = _setting(
    "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)
uses_mkldnn = _setting("_get_mkldnn_enabled", lambda: torch.backends.mkldnn.enabled)
mkldnn_is_deterministic = _setting(
    "_get_mkldnn_deterministic", lambda: torch.backends.mkldnn.deterministic
)
uses_cudnn = _setting("_get_cudnn_enabled", lambda: torch.backends.cudnn.enabled)
cudnn_benchmarks = _setting("_get_cudnn_benchmark", lambda: torch.backends.cudnn.benchmark)
cudnn_is_deterministic = _setting(
    "_get_cudnn_deterministic", lambda: torch.backends.cudnn.deterministic
)
attention_kernels = {
    "flash": _setting("_get_flash_sdp_enabled", torch.backends.cuda.flash_sdp_enabled),
    "efficient": _setting(
        "_get_mem_efficient_sdp_enabled", torch.backends.cuda.mem_efficient_sdp_enabled
    ),
    "math": _setting("_get_math_sdp_enabled", torch.backends.cuda.math_sdp_enabled),
    "cudnn": _setting("_get_cudnn_sdp_enabled", torch.backends.cuda.cudnn_sdp_enabled),
}
"""Whether `scaled_dot_product_attention` may choose a kernel, on CPUs, too."""
precision_of = _setting(
    "_get_fp32_precision_getter",  # not in torch 2.8
    lambda backend, op: getattr(getattr(torch.backends, backend), op).fp32_precision,
)
"""Return the precision in which a kind of operation of a backend computes with float32."""
