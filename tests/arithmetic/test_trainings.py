"""Whole trainings: one fingerprint on every layout, variant of the C part, and processor."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evenstep.arithmetic import native
from launched import alone, apart
from portable_trainings import TRAININGS, fingerprint, trained

TABLE = Path(__file__).with_name("fingerprints.json")
FINGERPRINTS = json.loads(TABLE.read_text())["fingerprints"]
"""As one processor gave them: what `python tests/support/portable_trainings.py` prints."""

SMALLER = "avx2" if "avx2" in native.runnable() else "plain"
ARM = Path(__file__).parents[2] / "build" / "arm" / "python"

PROGRAM = Path(__file__).parents[1] / "support" / "portable_trainings.py"

LAYOUTS = {
    "one device": {"devices": 1},
    "two devices": {"devices": ["cpu:0", "cpu:1"]},
    "three devices, two steps in flight": {
        "devices": ["cpu:0", "cpu:1", "cpu:2:own"],
        "max_in_flight": 2,
    },
}


QUICK = {*zip(TRAININGS, itertools.cycle(LAYOUTS), strict=False)}
"""Each training on one layout; the others are slow."""


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(
            name,
            layout,
            marks=[pytest.mark.slow] * ((name, layout) not in QUICK or name.startswith("ResNet")),
        )
        for name, layout in itertools.product(TRAININGS, LAYOUTS)
    ],
)
def test_every_processor_has_the_recorded_fingerprint(name, layout):
    if name == "perceptron, Muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch 2.9 has Muon")
    assert fingerprint(name, **LAYOUTS[layout]) == FINGERPRINTS[name]


def fingerprints_with(environment, *names):
    """Run the trainings in a process of their own, as a different processor computes them."""
    found = subprocess.run(
        [sys.executable, PROGRAM, *names],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)["fingerprints"]


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_torchs_own_vectors_move_no_bit(capability):
    names = ("LeNet, SGD", "GPT, AdamW", "LSTM, Adam")
    environment = {"ATEN_CPU_CAPABILITY": capability, "EVENSTEP_PORTABLE": SMALLER}
    found = fingerprints_with(environment, *names)
    assert found == {name: FINGERPRINTS[name] for name in names}


def found(out, rank=0):
    return json.loads(out.with_name(f"{out.name}.{rank}").read_text())


def test_unlike_processes_train_together(tmp_path):
    name, out = "LeNet, SGD", tmp_path / "out"
    variables = [{"ATEN_CPU_CAPABILITY": "default", "EVENSTEP_PORTABLE": SMALLER}, {}]
    for code, _, errors in apart("portable.py", out, name, variables=variables):
        assert code == 0, errors
    both = [found(out, rank) for rank in (0, 1)]
    assert both == [{"fingerprint": FINGERPRINTS[name], "notes": []}] * 2


def test_a_resume_on_a_different_processor_has_the_same_bits(tmp_path):
    name, out, folder = "GPT, AdamW", tmp_path / "out", tmp_path / "state"
    half = trained(name, devices=1, state=("save", folder))
    environment = {"ATEN_CPU_CAPABILITY": "default", "EVENSTEP_PORTABLE": SMALLER}
    done = alone(
        "portable.py", out, name, "load", folder, env={**os.environ, **environment}, fresh=True
    )
    assert done.returncode == 0, done.stderr
    assert found(out) == {"fingerprint": FINGERPRINTS[name], "notes": []}
    assert half != FINGERPRINTS[name]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "avx2", "avx512"])
def test_no_variant_of_the_c_part_moves_a_bit(variant):
    if variant not in native.runnable():
        pytest.skip(f"this processor can't run the variant {variant}")
    names = [name for name in TRAININGS if variant != "plain" or not name.startswith("ResNet")]
    found = fingerprints_with({"EVENSTEP_PORTABLE": variant}, *names)
    assert found == {name: FINGERPRINTS[name] for name in names}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_arm_has_the_same_bits():
    """Needs `make arm`: torch for ARM, of a different version, run by an emulator."""
    if not ARM.exists():
        pytest.skip("there is no Python for ARM: `make arm` makes one (Debian)")
    long, newer = "ResNet-18, SGD", "perceptron, Muon"  # of which torch 2.9.1 has an earlier one
    names = [name for name in TRAININGS if name not in (long, newer)]
    done = subprocess.run([ARM, PROGRAM, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["facts"]["machine"] == "aarch64"
    assert answer["fingerprints"] == {name: FINGERPRINTS[name] for name in names}
