"""What decides how numbers are rounded: named, compared, and tried on known computations."""

import ast
import os
import subprocess
import sys
import time

import pytest
import torch

from evenstep.devices import Device, arithmetic, arithmetic_facts, instruction_facts, known_results
from warm import run

CPU = [Device("cpu", 0)]


@pytest.fixture
def torch_as_it_was():
    before = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    yield
    torch.set_default_dtype(before[0])
    torch.set_float32_matmul_precision(before[1])
    torch.set_flush_denormal(False)
    torch.use_deterministic_algorithms(False)
    torch.backends.mkldnn.deterministic = False
    torch.backends.cuda.enable_flash_sdp(True)


CHANGES = {
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
    "the float32 precision": lambda: torch.set_float32_matmul_precision("medium"),
    "the treatment of denormal numbers": lambda: torch.set_flush_denormal(True),
    "torch.use_deterministic_algorithms": lambda: torch.use_deterministic_algorithms(True),
    "torch.backends.mkldnn.deterministic": lambda: setattr(
        torch.backends.mkldnn, "deterministic", True
    ),
    "the kernels of scaled_dot_product_attention": lambda: torch.backends.cuda.enable_flash_sdp(
        False
    ),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.usefixtures("torch_as_it_was")
def test_a_setting_of_torch_is_one_of_the_facts(name):
    before = arithmetic_facts(CPU)
    CHANGES[name]()
    after = arithmetic_facts(CPU)
    assert {fact for fact in before if before[fact] != after[fact]} == {name}


@pytest.mark.parametrize(
    ("variable", "value", "devices", "counts"),
    [
        ("MKL_CBWR", "COMPATIBLE", CPU, True),
        ("ONEDNN_MAX_CPU_ISA", "AVX2", CPU, False),  # known results tell
        ("MKL_ENABLE_INSTRUCTIONS", "AVX2", CPU, False),
        ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2:glibc.cpu.x86_hwcaps=-FMA", CPU, True),
        ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2", CPU, False),
        ("MKL_DYNAMIC", "FALSE", CPU, False),
        ("MKL_DYNAMIC", "FALSE", [Device("cpu", 0, threads=2)], True),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", CPU, False),
        ("OMP_NUM_THREADS", "7", CPU, False),
    ],
    ids=str,
)
def test_settings_in_the_environment_count_where_they_decide_bits(
    monkeypatch, variable, value, devices, counts
):
    monkeypatch.delenv(variable, raising=False)
    before = arithmetic_facts(devices)
    monkeypatch.setenv(variable, value)
    assert (arithmetic_facts(devices) != before) == counts


def test_kinds_and_threads_of_devices_are_facts_but_not_their_number():
    assert arithmetic_facts([Device("cpu", 0), Device("cpu", 1, own_memory=True)]) == (
        arithmetic_facts(CPU)
    )
    assert arithmetic_facts([Device("cpu", 0, threads=2)]) != arithmetic_facts(CPU)


def test_known_computations_give_the_same_every_time_and_leave_nothing_behind():
    torch.manual_seed(3)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with torch.inference_mode():
        first = known_results(CPU)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert known_results(CPU) == first
    assert torch.get_num_threads() == threads
    assert torch.get_rng_state().equal(state)
    assert len({*first.values()}) == len(first) == 12


def test_known_computations_take_less_than_50_ms():
    known_results(CPU)
    took = []
    for _ in range(5):
        began_s = time.process_time()
        known_results(CPU)
        took.append(time.process_time() - began_s)
    assert min(took) < 0.05


@pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="torch 2.9 has a newer way"
)
@pytest.mark.parametrize(
    "change",
    [
        "fp32_precision = 'tf32'",
        "mkldnn.fp32_precision = 'bf16'",
        "mkldnn.conv.fp32_precision = 'bf16'",
    ],
)
def test_a_precision_that_is_set_in_the_newer_way_is_told(change):
    """The older way of reading it raises an error then."""
    program = f"import torch; torch.backends.{change}; from evenstep.devices import *; "
    program += "print(arithmetic_facts([Device('cpu', 0)])['the float32 precision'])"
    found = run("-c", program)
    assert found.returncode == 0, found.stderr
    assert change.split("'")[1] in found.stdout
    assert "Error" not in found.stdout


def test_settings_of_instructions_are_known_as_causes(monkeypatch):
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "AVX2")
    assert instruction_facts()["MKL_ENABLE_INSTRUCTIONS"] == "AVX2"


PROGRAM = "from evenstep.devices import *; print(known_results([Device('cpu', 0)]))"


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="another processor"
)
def test_known_computations_tell_processors_apart():
    variables = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, "-c", PROGRAM]
    found = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert ast.literal_eval(found.stdout) != known_results(CPU)


def test_the_precision_in_which_gpus_add_up_is_a_fact(monkeypatch):
    before = arithmetic._gpu_facts()
    name = "allow_bf16_reduced_precision_reduction"
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "1024")
    was = getattr(torch.backends.cuda.matmul, name)
    try:
        setattr(torch.backends.cuda.matmul, name, False)
        after = arithmetic._gpu_facts()
    finally:
        setattr(torch.backends.cuda.matmul, name, was)
    differing = {key for key in after if after[key] != before[key]}
    assert differing == {f"torch.backends.cuda.matmul.{name}", "CUBLASLT_WORKSPACE_SIZE"}
