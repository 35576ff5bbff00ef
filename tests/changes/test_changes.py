"""CONTRIBUTING's frequent changes: each is a patch, which fits the code and does what it says.

A patch begins with its title and a program, its proof, which passes with the change alone.
"""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATCHES = sorted(HERE.glob("*.patch"))

by_name = pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)


def apply(patch, folder, *options):
    command = ["git", "apply", *options, str(patch)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def prove(patch, source):
    text = patch.read_text(encoding="utf-8").partition("\ndiff --git ")[0]
    proof = textwrap.dedent("".join(re.findall(r"^(?:    .*)?\n", text, re.MULTILINE)))
    path = os.pathsep.join(map(str, [source, ROOT / "tests" / "support"]))
    return subprocess.run(
        [sys.executable, "-c", proof],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def test_every_change_of_the_table_has_its_patch():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| .* \| (.*) \|$", text, re.MULTILINE)
    assert rows == ["an example", *(f"`{patch.stem}`" for patch in PATCHES)]


@by_name
def test_a_change_fits_the_code(patch):
    checked = apply(patch, ROOT, "--check")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.slow
@by_name
def test_a_change_does_what_it_says(patch, tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src")
    assert apply(patch, tmp_path).returncode == 0
    proved = prove(patch, tmp_path / "src")
    assert proved.returncode == 0, proved.stderr


@pytest.mark.exhaustive
@by_name
def test_nothing_is_proved_without_the_change(patch):
    proved = prove(patch, ROOT / "src")
    assert proved.returncode == 1, proved.stdout
