"""Whole trainings: one fingerprint on every layout, variant of the C part, and processor."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.arithmetic import native
from portable_trainings import TRAININGS, fingerprint

TABLE = Path(__file__).with_name("fingerprints.json")
FINGERPRINTS = json.loads(TABLE.read_text()) if TABLE.exists() else {}
"""As one processor gave them: what `python tests/support/portable_trainings.py` prints."""

PROGRAM = Path(__file__).parents[1] / "support" / "portable_trainings.py"

LAYOUTS = {
    "one device": {"devices": 1},
    "two devices": {"devices": ["cpu:0", "cpu:1"]},
    "three devices, two steps in flight": {
        "devices": ["cpu:0", "cpu:1", "cpu:2:own"],
        "max_in_flight": 2,
    },
}


@pytest.mark.parametrize("name", TRAININGS)
def test_every_processor_has_the_recorded_fingerprint(name):
    assert {layout: fingerprint(name, **LAYOUTS[layout]) for layout in LAYOUTS} == dict.fromkeys(
        LAYOUTS, FINGERPRINTS[name]
    )


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
    return json.loads(found.stdout)


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_torchs_own_vectors_move_no_bit(capability):
    names = ("LeNet, SGD", "GPT, AdamW", "LSTM, Adam")
    environment = {"ATEN_CPU_CAPABILITY": capability, "EVENSTEP_PORTABLE": "avx2"}
    found = fingerprints_with(environment, *names)
    assert found == {name: FINGERPRINTS[name] for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "avx2", "avx512"])
def test_no_variant_of_the_c_part_moves_a_bit(variant):
    if variant not in native.variants():
        pytest.skip("this machine has no such variant")
    names = [name for name in TRAININGS if variant != "plain" or not name.startswith("ResNet")]
    found = fingerprints_with({"EVENSTEP_PORTABLE": variant}, *names)
    assert found == {name: FINGERPRINTS[name] for name in names}
