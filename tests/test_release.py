"""What a release says of itself: one version, and checks that exist."""

import re
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
