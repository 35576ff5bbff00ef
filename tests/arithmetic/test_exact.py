"""Operations that are claimed to be exact: the same bits with vectors of every width."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evenstep.arithmetic.exact import NAMES, is_exact
from evenstep.arithmetic.mode import PortableMode
from exact_floats import odd_values, same

SCRIPT = Path(__file__).parents[1] / "support" / "exact_operations.py"
WIDEST = torch.backends.cpu.get_cpu_capability()
WIDTHS = {"AVX512": ["default", "avx2", "avx512"], "AVX2": ["default", "avx2"]}.get(WIDEST, [])


def hashes(width):
    """Return the hashes of all cases, computed by a process with vectors of one width."""
    env = {**os.environ, "ATEN_CPU_CAPABILITY": width}
    command = [sys.executable, "-W", "ignore", str(SCRIPT)]
    return json.loads(subprocess.run(command, env=env, check=True, capture_output=True).stdout)


@pytest.fixture(scope="module")
def by_width():
    if len(WIDTHS) < 2:
        pytest.skip("this processor has vectors of one width only")
    return {width: hashes(width) for width in WIDTHS}


@pytest.mark.slow
def test_every_operation_has_the_same_bits_with_all_vectors(by_width):
    plain = by_width["default"]
    for width, found in by_width.items():
        assert found.keys() == plain.keys()
        different = [name for name in plain if found[name] != plain[name]]
        assert not different, f"{width}: {different}"


@pytest.mark.slow
def test_every_operation_has_a_case(by_width):
    found = by_width["default"]
    assert not [name for name, cases in found.items() if not any(cases)]
    tried = {name.removeprefix("aten.").split(".")[0] for name in found}
    assert tried >= NAMES - {"set"}


def test_names_are_operations_of_torch():
    known = {name for name in NAMES for form in (name, f"{name}_") if hasattr(torch.ops.aten, form)}
    assert known == NAMES


@pytest.mark.parametrize("name", ["exp", "sum", "rsqrt", "pow", "add", "normal_", "fmod", "mm"])
def test_what_rounds_more_than_once_is_not_exact(name):
    packet = getattr(torch.ops.aten, name)
    assert not any(is_exact(getattr(packet, overload)) for overload in packet.overloads())


ROUNDED = {
    "mul": torch.mul,
    "div": torch.div,
    "reciprocal": lambda x, y: x.reciprocal(),
    "add": torch.add,
    "sub": torch.sub,
    "sqrt": lambda x, y: x.abs().sqrt(),
    "copysign": torch.copysign,
    "mul by a number": lambda x, y: x * 0.3,
    "div by a number": lambda x, y: x / 3.0,
    "leaky_relu": lambda x, y: torch.nn.functional.leaky_relu(x, 0.3),
    **{name: lambda x, y, name=name: getattr(x, name)() for name in ("floor", "ceil", "round")},
    **{name: lambda x, y, name=name: getattr(x, name)() for name in ("trunc", "frac", "sign")},
}


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("count", [1, 7, 5000])
def test_rounded_once(name, count):
    """float64 rounds what float32 rounds so finely that rounding its result is the same.

    Numbers in the table are those that float32 has: 0.3 would be a different one in float64.
    """
    a, b = odd_values(count, 1), odd_values(count, 2)
    scalar = name.endswith(("number", "relu"))
    expected = EXACTLY[name](a.double()) if scalar else ROUNDED[name](a.double(), b.double())
    with PortableMode():
        found = ROUNDED[name](a, b)
    assert same(found, expected.float())


F32_03 = float(torch.tensor(0.3))
EXACTLY = {
    "mul by a number": lambda x: x * F32_03,
    "div by a number": lambda x: x / 3.0,
    "leaky_relu": lambda x: torch.nn.functional.leaky_relu(x, F32_03),
}
"""The same with the float32 nearest to 0.3."""


ELEMENTWISE = {
    **{name: getattr(torch, name) for name in ("maximum", "minimum", "fmax", "fmin", "mul", "div")},
    **{name: getattr(torch, name) for name in ("copysign", "heaviside", "add", "sub", "clamp_min")},
    "where": lambda x, y: torch.where(x > y, x, y),
    "clamp": lambda x, y: x.clamp(-0.0, 0.7),
    "clamp by tensors": lambda x, y: x.clamp(y, y + 1),
    "relu": lambda x, y: x.relu(),
    "hardtanh_backward": lambda x, y: torch.ops.aten.hardtanh_backward(y, x, -1.0, 1.0),
    "threshold_backward": lambda x, y: torch.ops.aten.threshold_backward(y, x, 0),
    "hardshrink": lambda x, y: torch.nn.functional.hardshrink(x, 0.3),
    "hardshrink_backward": lambda x, y: torch.ops.aten.hardshrink_backward(y, x, 0.3),
    "softshrink": lambda x, y: torch.nn.functional.softshrink(x, 0.3),
    "softshrink_backward": lambda x, y: torch.ops.aten.softshrink_backward(y, x, 0.3),
    "leaky_relu": lambda x, y: torch.nn.functional.leaky_relu(x, 0.3),
    "leaky_relu_backward": lambda x, y: torch.ops.aten.leaky_relu_backward(y, x, 0.3, False),
    "prelu": lambda x, y: torch.ops.aten._prelu_kernel(x, y),
    **{name: lambda x, y, name=name: getattr(x, name)() for name in ("sign", "sqrt", "round")},
    **{name: lambda x, y, name=name: getattr(x, name)() for name in ("abs", "frac", "reciprocal")},
    "nan_to_num": lambda x, y: x.nan_to_num(),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_element_is_the_same_wherever_it_lies(name):
    """The body of a loop over vectors must compute what its tail computes."""
    x, y = odd_values(1500, 1), odd_values(1500, 2)
    signs = torch.tensor([0.0, -0.0, 0.2, -0.2])
    x, y = torch.cat([x, signs.repeat(4)]), torch.cat([y, signs.repeat_interleave(4)])
    with PortableMode():
        whole = ELEMENTWISE[name](x, y)
        single = [ELEMENTWISE[name](x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    assert same(whole, torch.cat(single))
