"""`evenstep doctor`: pure checks of facts about a machine, and the command itself."""

import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from commands import run
from evenstep.cli.machine.checks import (
    FEATURES,
    MachineFacts,
    feature_states,
    findings,
    install_line,
)
from evenstep.cli.machine.doctor import report
from evenstep.cli.machine.facts import read_facts
from evenstep.devices import usable_cores
from evenstep.private_torch.names import (
    RECOMMENDED_TORCH,
    TESTED_TORCH,
    PrivateName,
    all_names,
)

HEALTHY = MachineFacts(
    system="Linux",
    has_lock=True,
    evenstep="0.2.0",
    torch="2.13.0+cpu",
    packages={name: "1.0" for feature in FEATURES for name in feature.packages},
    has_compiler=True,
    cores=8,
    cores_used_by_others=0.0,
    free_bytes=8 << 30,
    shared_bytes=8 << 30,
    governors=(("acpi-cpufreq", "schedutil"), ("intel_pstate", "powersave")),
    is_on_battery=False,
    gpus=(),
    has_nvidia_driver=False,
    environment={"PATH": "/usr/bin", "OMP_PROC_BIND": "false"},
)
REQUIRED = importlib.metadata.requires("evenstep")


def machine(**changes):
    return dataclasses.replace(HEALTHY, **changes)


def test_on_a_healthy_machine_nothing_is_found():
    assert findings(HEALTHY) == []
    assert not any(state.missing for state in feature_states(HEALTHY))
    lines = [line.plain for line in report(HEALTHY)]
    assert lines.count("  nothing found") == 2
    assert not any("fix:" in line for line in lines)


def test_what_is_unknown_is_no_finding():
    assert findings(machine(cores_used_by_others=None, free_bytes=None, shared_bytes=None)) == []


def lacking(**changes):
    """A machine whose torch lacks a private name."""
    names = {"path": "torch._C._x", "purpose": "see it", "has_public_way": False, "needed": True}
    return {"torch_lacks": (PrivateName(**{**names, **changes}, is_there=False),)}


CASES = [
    (lacking(), "results", "_x, which evenstep reads to see it: no trainer", "install torch=="),
    (lacking(needed=False), "results", "what needs it will fail", "pip install torch=="),
    (lacking(has_public_way=True), "speed", "a slower public way", "pip install torch=="),
    ({"torch": "2.5.1"}, "results", "torch 2.5.1 is older than 2.6", "pip install torch=="),
    ({"torch": "1.13.0a0+git"}, "results", "is older than 2.6", "pip install"),
    ({"torch": "99.0.0"}, "results", "torch 99.0.0 is newer than 2", "pip install torch=="),
    ({"has_lock": False}, "results", "no global lock", "PYTHON_GIL=1"),
    ({"system": "Darwin"}, "results", "this is Darwin", "evenstep verify"),
    ({"environment": {"MKL_CBWR": "AVX2"}}, "results", "MKL_CBWR=AVX2", "unset MKL_CBWR"),
    (
        {"environment": {"ATEN_CPU_CAPABILITY": "default"}},
        *("results", "ATEN_CPU_CAPABILITY=default", "unset ATEN_CPU_CAPABILITY"),
    ),
    (
        {"gpus": ("H200",), "has_nvidia_driver": True},
        *(
            "results",
            "refuses GPUs that a script has used",
            "export CUBLAS_WORKSPACE_CONFIG=:4096:8",
        ),
    ),
    (
        {"gpus": ("H200", "A100"), "environment": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}},
        *("results", r"different models \(A100, H200\)", "GPUs of one model"),
    ),
    ({"has_nvidia_driver": True}, "speed", "can use no GPU", "build of torch for CUDA"),
    (
        {"environment": {"OMP_PROC_BIND": "TRUE"}},
        *("speed", "OMP_PROC_BIND=TRUE binds threads", "unset OMP_PROC_BIND"),
    ),
    (
        {"environment": {"OMP_WAIT_POLICY": "active"}},
        "speed",
        "keeps a core busy",
        "unset OMP_WAIT",
    ),
    ({"cores": 1}, "speed", "one core", "more cores"),
    ({"cores_used_by_others": 1.26}, "speed", r"use 1\.3 of 8 cores", "--devices"),
    ({"governors": (("acpi-cpufreq", "powersave"),)}, "speed", "lowest clock", "performance"),
    ({"is_on_battery": True}, "speed", "battery", "plug it in"),
    ({"free_bytes": 1 << 29}, "speed", r"0\.5 GiB of memory are free", "smaller model"),
    ({"shared_bytes": 64 << 20}, "speed", "/dev/shm has 64 MiB", "--shm-size=1g"),
]


@pytest.mark.parametrize(("changes", "kind", "text", "fix"), CASES)
def test_each_check_finds_one_thing_and_names_the_fix(changes, kind, text, fix):
    (found,) = findings(machine(**changes))
    assert found.kind == kind
    assert re.search(text, found.text)
    assert fix in found.fix
    lines = [line.plain for line in report(machine(**changes))]
    assert lines[lines.index(f"  {found.text}") + 1] == f"    fix: {found.fix}"


def test_a_name_that_the_recommended_torch_lacks_too_is_no_finding():
    assert findings(machine(**lacking(has_public_way=True, is_in_recommended=False))) == []


@pytest.mark.skipif(
    torch.__version__.partition("+")[0] != RECOMMENDED_TORCH, reason="the recommended torch"
)
def test_the_recommended_torch_has_what_it_is_said_to_have():
    """Otherwise the fix of a finding would be to install the version that is there already."""
    different = [one.path for one in all_names() if one.is_there != one.is_in_recommended]
    assert different == []


def test_threads_bound_to_one_core_are_no_reason_to_ask_for_more_cores():
    (found,) = findings(machine(cores=1, environment={"OMP_PLACES": "cores"}))
    assert "OMP_PLACES" in found.text


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux")
def test_openmp_does_bind_the_devices_threads_to_one_core():
    """The reason for a check: without it, nobody would look for this."""
    program = (
        "import os, threading, torch\n"
        "thread = threading.Thread(target=lambda: print(len(os.sched_getaffinity(0))))\n"
        "torch.ones(99, 99) @ torch.ones(99, 99); thread.start(); thread.join()"
    )
    if usable_cores() < 2 or "OpenMP" not in torch.__config__.show():
        pytest.skip("needs two cores and OpenMP")
    environment = {**os.environ, "OMP_PROC_BIND": "true"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"


def test_results_come_before_speed():
    bad = machine(is_on_battery=True, system="Darwin", cores=1, torch="2.0")
    assert [one.kind for one in findings(bad)] == ["results", "results", "speed", "speed"]


# --- features


def test_what_is_missing_is_named_with_the_line_that_installs_it():
    kept = {name: "1.0" for name in HEALTHY.packages if name != "onnxruntime"}
    states = {one.name: one for one in feature_states(machine(packages=kept, has_compiler=False))}
    assert states["export to ONNX"].missing == ("onnxruntime",)
    assert states["export to ONNX"].fix == "pip install 'evenstep[onnx]'"
    assert states["compiled shards (train --compile)"].missing == ("a C++ compiler",)
    assert sum(bool(one.missing) for one in states.values()) == 2


def test_several_missing_packages_are_listed():
    lines = [line.plain for line in report(machine(packages={}))]
    assert "  export to ONNX: needs onnx, onnxscript and onnxruntime" in lines
    assert "  Lightning's Trainer: needs lightning" in lines


def test_without_an_installed_evenstep_the_folder_is_installed():
    assert install_line("onnx", is_installed=False).startswith(
        "pip install '.[onnx]' in the folder"
    )


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_the_extra_of_a_feature_brings_its_packages(feature):
    brought = [line for line in REQUIRED if re.search(rf"extra == .{feature.extra}.$", line)]
    names = {re.match(r"[\w-]+", line)[0] for line in brought}
    assert set(feature.packages) <= names


def test_the_range_of_torch_is_that_of_the_tested_versions():
    oldest, newest = ([*map(int, TESTED_TORCH[end].split(".")[:2])] for end in (0, -1))
    project = Path(__file__).parents[2] / "pyproject.toml"
    lower, upper = re.search(r'"torch>=([\d.]+),<([\d.]+)"', project.read_text("utf-8")).groups()
    assert [*map(int, lower.split("."))] == oldest
    assert [*map(int, upper.split("."))] == [newest[0], newest[1] + 1]


def test_the_report_names_the_tested_versions():
    lines = [line.plain for line in report(machine())]
    assert f"tested with torch {', '.join(TESTED_TORCH)}" in lines


# --- this machine


def test_the_facts_of_this_machine():
    facts = read_facts({"PATH": "/usr/bin"})
    assert facts.torch == torch.__version__
    assert facts.cores == usable_cores()
    assert facts.environment == {"PATH": "/usr/bin"}
    assert facts.free_bytes is None or facts.free_bytes > 0
    assert facts.cores_used_by_others is None or facts.cores_used_by_others <= usable_cores()


def test_the_command_prints_each_feature_and_each_heading(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    output = run("doctor").stdout
    for part in (
        "Features",
        "Would change results",
        "Would slow training down",
        torch.__version__,
    ):
        assert part in output
    assert output.count(": ready\n") + output.count(": needs ") == len(FEATURES) + 1
    assert "  MKL_CBWR=COMPATIBLE changes" in output


def test_as_json_it_is_one_object_without_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setenv("SECRET", "xyzzy")
    output = run("doctor", "--json").stdout
    found = json.loads(output)
    assert list(found) == ["facts", "tested_torch", "features", "findings"]
    assert "OMP_WAIT_POLICY" in json.dumps(found["findings"])
    assert "xyzzy" not in output


def test_the_doctor_sees_what_the_user_has_set_and_not_what_the_program_sets(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen = []
    monkeypatch.setattr(
        "evenstep.cli.machine.doctor.read_facts", lambda env: seen.append(env) or HEALTHY
    )
    run("doctor")
    assert "CUBLAS_WORKSPACE_CONFIG" not in seen[0]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
