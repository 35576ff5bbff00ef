"""Describes how this process rounds: its processor, libraries, settings, and known results.

Two processes whose facts are equal compute a shard with the same bits. Settings in the environment
are read only to be compared; evenstep itself obeys none of them.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.backends.opt_einsum  # which torch 2.6 leaves to the first einsum
from torch.nn import functional

from evenstep.devices.device import Device
from evenstep.devices.placement import intra_op_threads
from evenstep.private_torch.compilers import (
    attention_kernels,
    is_deterministic,
    mkldnn_is_deterministic,
    precision_of,
    uses_mkldnn,
    uses_nnpack,
)

_Read = Callable[[], object]

VARIABLES = (
    "DNNL_CPU_ISA_HINTS",
    "DNNL_DEFAULT_FPMATH_MODE",
    "MKL_CBWR",
    "ONEDNN_CPU_ISA_HINTS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
)
"""Settings in the environment that change which kernels libraries choose, or how these compute."""

INSTRUCTIONS = (
    "DNNL_MAX_CPU_ISA",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
)
"""Settings in the environment that choose the instructions of a processor. Whether they move a bit
depends on the processor and on the library: the results of known computations tell."""

THREAD_VARIABLES = ("MKL_DYNAMIC", "OMP_DYNAMIC")
"""Settings that change how many threads a computation is split over, where there are several."""

GPU_VARIABLES = (
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "DISABLE_ADDMM_CUDA_LT",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
)
"""Settings for GPUs."""

_HALF_PRECISION = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",  # of torch 2.7
)
"""Settings of `torch.backends.cuda.matmul` that decide in which precision products add up."""

_LIBRARIES = {
    "MKL": r"Math Kernel Library Version (\S+)",
    "oneDNN": r"MKL-DNN v(\S+)",
    "OpenMP": r"OpenMP (\d+)",
    "BLAS": r"BLAS_INFO=(\w+)",
}


def arithmetic_facts(devices: Sequence[Device]) -> dict[str, str]:
    """Return what decides the bits of a computation on these devices, by name."""
    facts = {
        "the kinds of devices": ", ".join(sorted({device.model_name for device in devices})),
        "the number of threads of a device": ", ".join(
            sorted({str(device.threads) for device in devices})
        ),
        "the version of torch": f"{torch.__version__} ({str(torch.version.git_version)[:12]})",
        "the CPU capability": torch.backends.cpu.get_cpu_capability(),
        "the machine": platform.machine(),
        "the C library": " ".join(platform.libc_ver()),
        **{f"the version of {name}": version for name, version in _libraries()},
        **_environment(VARIABLES),
        **_flags(),
    }
    tunables = os.environ.get("GLIBC_TUNABLES", "").split(":")
    facts["GLIBC_TUNABLES"] = ":".join(one for one in tunables if ".cpu." in one) or "not set"
    if any(device.threads > 1 for device in devices):
        facts |= _environment(THREAD_VARIABLES)
    if any(device.is_accelerator for device in devices):
        facts |= _gpu_facts()
    return facts


def instruction_facts() -> dict[str, str]:
    """Return what may be why known results differ, by name: by itself it moves no bit."""
    return _environment(INSTRUCTIONS)


def known_results(devices: Sequence[Device]) -> dict[str, str]:
    """Return digests of known small computations on the CPU, which takes some milliseconds.

    Args:
        devices: the devices of this process; the computations use as many threads.
    """
    with (
        intra_op_threads(max(device.threads for device in devices)),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        found = {name: _digest(results()) for name, results in _KNOWN.items()}
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            found |= {f"{name} in bfloat16": _digest(_KNOWN[name]()) for name in _CAST}
    return {f"the result of known {name}": digest for name, digest in found.items()}


def hash_seed() -> str:
    """Return the seed with which Python hashes strings; "random" if each process has its own.

    It decides the order in which a set of strings is iterated, and with it what such code computes.
    """
    given = "" if sys.flags.ignore_environment else os.environ.get("PYTHONHASHSEED", "")
    return given or "random"


def _libraries() -> Iterator[tuple[str, str]]:
    built = torch.__config__.show()
    for name, pattern in _LIBRARIES.items():
        match = re.search(pattern, built)
        yield name, match[1] if match else "none"


def _environment(names: Sequence[str]) -> dict[str, str]:
    return {name: os.environ.get(name, "not set") for name in names}


def _gpu_facts() -> dict[str, str]:
    backends = torch.backends
    return {
        "the version of CUDA": str(torch.version.cuda),
        "the version of cuDNN": str(backends.cudnn.version()),
        "torch.backends.cudnn.enabled": str(backends.cudnn.enabled),
        "the float32 precision of CUDA": _precision(*_precisions_on_gpus()),
        **{
            f"torch.backends.cuda.matmul.{name}": _value_of(
                str, [functools.partial(getattr, backends.cuda.matmul, name)]
            )
            for name in _HALF_PRECISION
        },
        **_environment(GPU_VARIABLES),
    }


def torch_settings() -> dict[str, str]:
    """Return settings of torch that change which kernels it uses, or how these compute."""
    return {name: _value_of(*setting) for name, setting in _SETTINGS.items()}


CALL: Callable[[Any], object]
CALL = getattr(operator, "call", operator.methodcaller("__call__"))  # new in Python 3.11
"""Calls a function, past Python's profilers if it is one in C."""

_KINDS = ("matmul", "conv", "rnn")
_HAS_PRECISIONS = hasattr(torch.backends, "fp32_precision")  # of torch 2.9
_PRECISIONS: tuple[_Read, ...] = (torch.get_float32_matmul_precision, lambda: False)
if _HAS_PRECISIONS:
    _PRECISIONS = tuple(functools.partial(precision_of, "mkldnn", kind) for kind in _KINDS)


def _precisions_on_gpus() -> Iterator[object]:
    if _HAS_PRECISIONS:
        backends: Any = torch.backends
        kinds = backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn
        return (kind.fp32_precision for kind in kinds)
    return iter((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))


def _precision(*found: object) -> str:
    """Spell the precision in which each kind of operation computes with float32.

    It can be set in two ways, and torch refuses to read the older one after the newer one.
    """
    if not _HAS_PRECISIONS:
        return ", ".join(map(str, found))
    if found[0] == "none":  # as `set_float32_matmul_precision("highest")` has it
        found = ("ieee", *found[1:])
    return ", ".join(f"{kind} {precision}" for kind, precision in zip(_KINDS, found, strict=True))


_EINSUM = getattr(torch.backends.opt_einsum, "m", torch.backends.opt_einsum)

_SETTINGS: dict[str, tuple[Callable[..., str], tuple[_Read, ...]]] = {
    "the default dtype": (str, (torch.get_default_dtype,)),
    "the float32 precision": (_precision, _PRECISIONS),
    "torch.use_deterministic_algorithms": (str, (is_deterministic,)),
    "torch.backends.mkldnn.enabled": (str, (uses_mkldnn,)),
    "torch.backends.mkldnn.deterministic": (str, (mkldnn_is_deterministic,)),
    "torch.backends.nnpack": (str, (uses_nnpack,)),
    "torch.backends.opt_einsum": (
        lambda *found: str(found),
        tuple(functools.partial(getattr, _EINSUM, name) for name in ("enabled", "strategy")),
    ),
    "the kernels of scaled_dot_product_attention": (
        lambda *are_allowed: ", ".join(itertools.compress(attention_kernels, are_allowed)),
        tuple(attention_kernels.values()),
    ),
}
"""For each setting, how it is spelled, and what reads it."""

READS: tuple[_Read, ...] = tuple(read for _, reads in _SETTINGS.values() for read in reads)
"""What reads the same settings, quickly enough to do so at each op."""


def _flags() -> dict[str, str]:
    """Return the settings of torch, and how the processor treats denormal numbers."""
    flags = torch_settings()
    smallest = torch.tensor([1], dtype=torch.int32, device="cpu").view(
        torch.float32
    )  # a denormal number
    flags["the treatment of denormal numbers"] = (
        "kept" if (smallest * 1).view(torch.int32).item() else "flushed"
    )
    return flags


def _value_of(spell: Callable[..., str], reads: Sequence[_Read]) -> str:
    try:
        return spell(*map(CALL, reads))
    except (AttributeError, RuntimeError) as error:  # settings that contradict each other
        return type(error).__name__


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers in [-0.5, 0.5), the same on every machine: they are computed exactly."""
    count = torch.Size(shape).numel()
    integers = torch.arange(1, count + 1, dtype=torch.int64, device="cpu") * 2654435761 % 65536
    return ((integers.to(torch.float64) - 32768) / 65536).to(dtype).reshape(shape)


def _with_gradients(
    function: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> list[torch.Tensor]:
    """Return the function's output, and the gradients of the inputs."""
    leaves = [one.detach().requires_grad_() for one in inputs]
    output = function(*leaves)
    weights = _numbers(*output.shape, dtype=output.dtype)
    # Weights given to `autograd.grad` would make it import sympy, which takes half a second.
    return [output, *torch.autograd.grad((output * weights).sum(), leaves)]


def _products() -> list[torch.Tensor]:
    wide = _with_gradients(functional.linear, _numbers(37, 700), _numbers(65, 700), _numbers(65))
    single, double = _numbers(9, 129), _numbers(33, 130, dtype=torch.float64)
    return [*wide, single @ single.T, single @ single[0], double @ double.T]


def _long_products() -> list[torch.Tensor]:
    """Return products over more numbers than libraries add up at once, and of odd numbers."""
    found = []
    for dtype in torch.float32, torch.float64, torch.bfloat16:
        long, odd = _numbers(5, 4099, dtype=dtype), _numbers(3, 17, 23, dtype=dtype)
        found += [long @ long.T, long @ long[0], torch.bmm(odd, odd.mT), *_recurrent(dtype)]
    return found


def _recurrent(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    state, x = _numbers(1, 4, 9, dtype=dtype), _numbers(3, 4, 6, dtype=dtype)
    shapes = (36, 6), (36, 9), (36,), (36,)
    weights = [_numbers(*shape, dtype=dtype) for shape in shapes]
    return torch.lstm(x, [state, state], weights, True, 1, 0.0, False, False, False)


def _strided_convolutions() -> list[torch.Tensor]:
    """Return convolutions with steps, borders and groups."""
    x, few, alone = _numbers(5, 8, 9, 9), _numbers(8, 8, 3, 3), _numbers(8, 1, 3, 3)
    doubles = x.double(), few.double()
    return [
        *_with_gradients(lambda x, w: functional.conv2d(x, w, None, 2, 1), x, few),
        *_with_gradients(lambda x, w: functional.conv2d(x, w, groups=8), x, alone),
        *_with_gradients(lambda x, w: functional.conv2d(x, w, None, 2, 1), *doubles),
    ]


def _attention() -> list[torch.Tensor]:
    x = _numbers(2, 3, 37, 16)
    return _with_gradients(functional.scaled_dot_product_attention, x, x.flip(0), x.flip(1))


def _convolutions() -> list[torch.Tensor]:
    images, weights = _numbers(4, 6, 14, 14), _numbers(16, 6, 5, 5)
    layouts = (torch.contiguous_format, torch.channels_last)
    return [
        result
        for layout in layouts
        for result in _with_gradients(
            functional.conv2d,
            images.contiguous(memory_format=layout),
            weights.contiguous(memory_format=layout),
        )
    ]


def _functions() -> list[torch.Tensor]:
    x = _numbers(7, 301) * 8
    smooth = (torch.exp, torch.sigmoid, torch.tanh, torch.sin, functional.gelu, functional.silu)
    results = [result for function in smooth for result in _with_gradients(function, x)]
    results += _with_gradients(lambda x: functional.log_softmax(x, 1), x)
    return [*results, x.abs().log1p(), torch.addcdiv(x, x, x.square().sqrt() + 1e-8, value=-0.1)]


def _sums() -> list[torch.Tensor]:
    x = _numbers(23, 12, 37)
    normal = _with_gradients(lambda x: functional.batch_norm(x, None, None, training=True), x)
    layer = _with_gradients(lambda x: functional.layer_norm(x, [37]), x)
    return [x.sum(), x.mean((0, 2)), x.var(1), x.norm(), *normal, *layer]


def _random_numbers() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    empty = torch.empty(97, dtype=torch.float32, device="cpu")
    drawn = [
        empty.clone().normal_(generator=generator),
        empty.clone().uniform_(generator=generator),
    ]
    return [*drawn, empty.clone().bernoulli_(0.3, generator=generator)]


_KNOWN: dict[str, Callable[[], list[torch.Tensor]]] = {
    "matrix products": _products,
    "convolutions": _convolutions,
    "functions": _functions,
    "sums": _sums,
    "random numbers": _random_numbers,
    "long products": _long_products,
    "strided convolutions": _strided_convolutions,
    "attention": _attention,
}
_CAST = ("matrix products", "convolutions", "strided convolutions", "attention")


def _digest(results: Sequence[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for result in results:
        digest.update(result.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
