"""What a release says of itself: one version, and checks that exist."""

import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

import dist
import evenstep

ROOT = Path(__file__).parents[1]


def read(name):
    file = ROOT / name
    if not file.exists():
        pytest.skip(f"{name} is not in this copy of the project")
    return file.read_text(encoding="utf-8")


def test_the_version_stands_in_one_place():
    said = re.compile(r"^version\b|^ *__version__ = ", re.MULTILINE)
    assert said.findall(read("pyproject.toml")) == said.findall(read("CITATION.cff")) == []
    assert said.findall(read("src/evenstep/__init__.py")) == ["__version__ = "]
    assert re.search(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)[1] == evenstep.__version__
    assert metadata.version("evenstep") == evenstep.__version__


def test_what_runs_elsewhere_are_targets_of_make():
    targets = set(re.findall(r"^(\w+):", read("Makefile"), re.MULTILINE))
    called = [
        target
        for name in (".ci/run", ".github/workflows/tests.yml", ".pre-commit-config.yaml")
        for target in re.findall(r"\bmake (\w+)", read(name))
    ]
    assert {"check", "lint", "types"} <= set(called) <= targets


def test_the_oldest_and_the_newest_python_are_checked():
    (line,) = re.findall(r"^ +python: \[(.+)\]$", read(".github/workflows/tests.yml"), re.MULTILINE)
    versions = re.findall(r'"(3\.\d+)"', line)
    oldest = re.search(r'^requires-python = ">=(.+)"$', read("pyproject.toml"), re.MULTILINE)[1]
    assert versions[0] == oldest
    assert versions == dist.PYTHONS


def test_the_oldest_torch_the_pinned_and_the_newest_are_checked():
    workflow, project = read(".github/workflows/tests.yml"), read("pyproject.toml")
    checked = set(re.findall(r'torch: \[?"?([\w.]+)', workflow))
    oldest = re.search(r'^ +"torch>=([\d.]+)', project, re.MULTILINE)[1]
    pinned = re.search(r"^torch==(.+)$", read("constraints.txt"), re.MULTILINE)[1]
    assert checked == {f"{oldest}.0", pinned, "newest"}


def test_actions_of_others_are_pinned_to_a_revision():
    used = re.findall(r"uses: \S+?@(\S+)", read(".github/workflows/tests.yml"))
    assert used
    assert all(re.fullmatch("[0-9a-f]{40}", revision) for revision in used)


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
