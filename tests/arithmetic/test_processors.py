"""The functions in C have the same bits on ARM (run by qemu) as on this machine.

A call is a function's name and its arguments in order (see `calls.c`): `number(5)` for a `long`,
`real(0.3)` for a `float`, `numbers(1, 2)` for an array of `long`, `given(n, seed)` and
`wild(n, seed)` for input, `output(n)` for an array whose bits are compared, `working(n)` for
scratch.
To have a function compared, add calls to CALLS.
"""

import itertools
import platform
import shutil
import subprocess

import pytest

from evenstep.arithmetic.compile import FLAGS, SOURCES, VARIANTS, compiler, machine
from evenstep.arithmetic.sums.convolutions import Array, Window, _geometry
from evenstep.arithmetic.sums.products import _matrices

CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"


def number(value):
    return f"l {int(value)}"


def real(value):
    return f"f {float(value).hex()}"


def numbers(*values):
    return " ".join(map(str, ["t", len(values), *map(int, values)]))


def given(count, seed):
    return f"i {count} {seed}"


def wild(count, seed):
    return f"w {count} {seed}"


def output(count):
    return f"o {count}"


def working(count):
    return f"s {count}"


def dense(*shape):
    sizes = [*itertools.accumulate(reversed(shape[1:]), int.__mul__, initial=1)]
    return Array(shape, tuple(reversed(sizes)))


def products():
    for m, k, n in [(1, 1, 1), (13, 20, 33), (48, 300, 40), (7, 0, 5), (200, 9, 17), (3, 50, 1100)]:
        for of_a, of_b in itertools.product([(0, k, 1), (0, 1, m)], [(0, n, 1), (0, 1, k)]):
            found = _matrices(3, False, (2, m, k), of_a, (2, k, n), of_b, (n,), (1,))
            yield (
                *("multiply_matrices", numbers(*found._values), wild(m * k, 1), wild(k * n, 2)),
                *(wild(n, 3), output(2 * m * n), real(0.7), real(-1.3), working(found.floats)),
            )


WINDOWS = [  # source, weight, window; out without a batch
    ((3, 4, 14, 14), (6, 4, 5, 5), Window((1, 1), (2, 2), (1, 1), 1), (6, 14, 14)),
    ((2, 6, 9, 9), (4, 3, 3, 3), Window((2, 2), (1, 1), (1, 1), 2), (4, 5, 5)),
    ((2, 6, 9, 45), (6, 1, 3, 3), Window((1, 1), (1, 0), (1, 2), 6), (6, 9, 41)),
    ((2, 30, 6, 6), (20, 30, 1, 1), Window((1, 1), (0, 0), (1, 1), 1), (20, 6, 6)),
]


def convolutions():
    for source, weight, window, out in WINDOWS:
        arrays = dense(*source), dense(*weight), dense(source[0], *out)
        size, weights, outs = (dense_size(array) for array in arrays)
        forward = _geometry(*arrays, window, False)
        backward = _geometry(*reversed(arrays), window, True)
        described, memory = numbers(*forward._values), working(forward.floats)
        of_source = numbers(*backward._values), working(backward.floats)
        operands = (wild(size, 4), wild(weights, 5))
        yield "convolve", described, *operands, wild(weight[0], 6), output(outs), memory
        yield (
            *("convolve", of_source[0], wild(outs, 7), wild(weights, 5), number(0)),
            *(output(size), of_source[1]),
        )
        of_out = given(outs, 7), output(weights)
        yield "convolve_for_weights", described, given(size, 4), *of_out, memory
        sizes = [number(n) for n in (0, out[0], source[0], out[1] * out[2], 1)]
        yield "reduce", *sizes, wild(outs, 8), "d 1", number(0), output(out[0])


def dense_size(array):
    return array.shape[0] * array.strides[0]


CALLS = [*products(), *convolutions()]


def hashes(folder, name, command, run=()):
    """Compile the functions and `calls.c`; return what the program prints for all calls."""
    names = sorted({call[0] for call in CALLS})
    table = folder / "table.c"
    table.write_text(
        "struct named { const char *name; void (*function)(void); };\n"
        + "".join(f"extern void {name}(void);\n" for name in names)
        + "const struct named functions[] = {"
        + "".join(f'{{"{name}", {name}}}, ' for name in names)
        + "{0, 0}};\n"
    )
    program = folder / name
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC", "-fvisibility=hidden")]
    sources = [table, __file__.replace("test_processors.py", "calls.c"), *SOURCES.glob("*.c")]
    options = ['-DVARIANT="test"', "-static", *map(str, sources), "-o", str(program)]
    subprocess.run([*command, *flags, *options], check=True)
    script = "".join(f"{call[0]} {len(call) - 1} {' '.join(call[1:])}\n" for call in CALLS)
    ran = subprocess.run([*run, program], input=script, check=True, capture_output=True, text=True)
    return ran.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_arm_has_the_bits_of_x86(tmp_path):
    if platform.machine() != "x86_64":
        pytest.skip("compares ARM with x86-64, so it runs on the latter")
    for tool in (CROSS_COMPILER, EMULATOR):
        if not shutil.which(tool):
            pytest.skip(f"{tool} is not installed")
    here = hashes(tmp_path, "here", [compiler(), *VARIANTS[machine()]["plain"]])
    options = VARIANTS["aarch64"]["plain"]
    arm = hashes(tmp_path, "arm", [CROSS_COMPILER, *options], [EMULATOR])
    assert len(here) == len(CALLS) > 40
    assert arm == here
