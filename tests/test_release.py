"""What a release says of itself: one version, and checks that exist."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import evenstep

ROOT = Path(__file__).parents[1]


def read(name):
    file = ROOT / name
    if not file.exists():
        pytest.skip(f"{name} is not in this copy of the project")
    return file.read_text(encoding="utf-8")


def test_every_file_names_one_version():
    stated = [
        re.search(r'^version = "(.+)"$', read("pyproject.toml"), re.MULTILINE),
        re.search(r"^version: (.+)$", read("CITATION.cff"), re.MULTILINE),
    ]
    assert [match[1] for match in stated] == [evenstep.__version__] * 2


def test_what_runs_elsewhere_are_targets_of_make():
    targets = set(re.findall(r"^(\w+):", read("Makefile"), re.MULTILINE))
    called = [
        target
        for name in (".ci/run", ".github/workflows/check.yml", ".pre-commit-config.yaml")
        for target in re.findall(r"\bmake (\w+)", read(name))
    ]
    assert {"check", "lint", "types"} <= set(called) <= targets


def test_the_oldest_and_the_newest_python_are_checked():
    versions = re.findall(r'"(3\.\d+)"', read(".github/workflows/check.yml"))
    oldest = re.search(r'^requires-python = ">=(.+)"$', read("pyproject.toml"), re.MULTILINE)[1]
    assert versions[0] == oldest
    assert "3.14" in versions


def placeholders(folder):
    """Run `make placeholders` in a folder."""
    return subprocess.run(
        ["make", "--silent", "placeholders"], cwd=folder, capture_output=True, text=True, timeout=60
    )


def test_a_release_with_an_address_that_is_not_filled_in_is_stopped(tmp_path):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    names = re.search(r"^RELEASED := (.+)$", read("Makefile"), re.MULTILINE)[1].split()
    assert {"pyproject.toml", "README.md"} <= set(names)
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in names:
        (tmp_path / name).write_text("https://example.org\n", encoding="utf-8")
    assert placeholders(tmp_path).returncode == 0
    (tmp_path / names[0]).write_text("a\nhttps://placeholder.invalid/x\n", encoding="utf-8")
    stopped = placeholders(tmp_path)
    assert stopped.returncode != 0
    assert stopped.stdout == f"{names[0]}:2:https://placeholder.invalid/x\n"


def test_no_made_up_address_is_anywhere():
    """Addresses that are not known yet are placeholders, which `make placeholders` finds."""
    addresses = re.findall(r"https?://[\w.-]+", read("pyproject.toml") + read("CITATION.cff"))
    assert set(addresses) == {"https://placeholder.invalid"}
