"""The variants of the C part of portable arithmetic that this processor can run."""

import torch

from evenstep.arithmetic import native

_FIT = {"AVX512": ["plain", "avx2", "avx512"], "AVX2": ["plain", "avx2"]}


def runnable() -> list[str]:
    """Return their names, the smallest first: of those that were compiled."""
    fit = _FIT.get(torch.backends.cpu.get_cpu_capability(), ["plain"])
    return [variant for variant in fit if variant in native.variants()]
