"""The snippets of README and of the how-to pages, run as they stand there.

Python is run; of the commands, every option must exist, and those that take seconds are run too.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from evenstep.cli import main

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LONG = ("fashion-mnist", "evenstep bench", "evenstep reproduce", "evenstep export", "--resume")


def blocks(page, language):
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [code for kind, code in found if kind == language]


def commands(page):
    """Return the command lines of a page, without comments and what stands before `evenstep`."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    for line in lines:
        words = (
            shlex.split(line, comments=True) if "evenstep" in line and "bash -c" not in line else []
        )
        if "evenstep" in words:
            yield words[words.index("evenstep") + 1 :]


COMMANDS = sorted({tuple(words) for page in PAGES for words in commands(page)})
README = blocks(ROOT / "README.md", "python")
TRAINING = [code for code in README if "trainer.epoch(" in code]


def program(code, devices='"auto"', epochs=1):
    """Return a training of a page with few epochs, on these devices."""
    assert re.search(r"range\(\d+\)", code)
    return re.sub(r"range\(\d+\)", f"range({epochs})", code).replace('"auto"', devices)


def run(code, name="snippet"):
    exec(compile(code, f"<{name}>", "exec"), {"__name__": name})


def test_there_are_commands_and_a_training():
    assert len(COMMANDS) > 20
    assert len(TRAINING) >= 1


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_option_of_a_command_exists(words):
    result = CliRunner().invoke(main, [*words, "--help"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("Usage: ")


def test_an_option_that_does_not_exist_would_be_found():
    assert CliRunner().invoke(main, ["train", "--devcies", "2", "--help"]).exit_code != 0


def marks(code):
    return [pytest.mark.slow] if "hybridize(" in code else []  # the compilers


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=marks(code)) for number, code in enumerate(README)]
)
def test_a_snippet_of_readme_runs_by_itself(number, tmp_path, monkeypatch):
    pytest.importorskip("sklearn", reason="pip install scikit-learn")
    monkeypatch.chdir(tmp_path)
    code = README[number]
    run(program(code) if code in TRAINING else code)


def test_the_training_of_readme_has_one_result_on_any_devices(capsys):
    pytest.importorskip("sklearn", reason="pip install scikit-learn")
    for code in TRAINING:
        printed = []
        for devices in ('"auto"', "1", '["cpu:0", "cpu:1:own"]', '"auto"'):
            run(program(code, devices))
            printed.append(capsys.readouterr().out)
        assert re.search(r"[0-9a-f]{64}", printed[0])
        assert len(set(printed)) == 1


@pytest.mark.slow  # two fresh processes
@pytest.mark.timeout(310)
def test_the_training_of_readme_has_the_same_result_in_two_processes(tmp_path, capsys):
    pytest.importorskip("sklearn", reason="pip install scikit-learn")
    for code in TRAINING:
        run(program(code))
        alone = re.findall(r"[0-9a-f]{64}", capsys.readouterr().out)
        script = tmp_path / "train.py"
        script.write_text(program(code, "1"), encoding="utf-8")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [sys.executable, *launcher, str(script)], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert re.findall(r"[0-9a-f]{64}", done.stdout) == 2 * alone


@pytest.mark.slow  # each command of README that takes seconds
@pytest.mark.timeout(900)
def test_the_short_commands_of_readme_run_one_after_the_other(tmp_path):
    pytest.importorskip("sklearn", reason="pip install scikit-learn")
    ran = 0
    for words in commands(ROOT / "README.md"):
        line = " ".join(["evenstep", *words])
        if any(one in line for one in LONG):
            continue
        few = ["--epochs", "1"] if words[0] == "train" and "--epochs" not in words else []
        done = subprocess.run(
            [sys.executable, "-m", "evenstep", *words, *few],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"
        ran += 1
    assert ran >= 4


@pytest.mark.slow  # the compilers
@pytest.mark.timeout(310)
def test_the_page_on_export_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run("\n".join(blocks(ROOT / "docs" / "export.md", "python")))
