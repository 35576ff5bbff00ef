"""The README: its program runs, gives what it promises, and the page stays short and true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
SIGNS = {"plain": "-", "evenstep": "+"}

sys.path.insert(0, str(ROOT / "benchmarks"))
from readme_program import program  # noqa: E402


def run(code, folder, *launcher):
    """Run a program in a fresh process; return the lines that it prints."""
    file = folder / "train.py"
    file.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, *launcher, str(file)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow  # six fresh interpreters
@pytest.mark.timeout(600)
def test_the_program_gives_one_fingerprint_again_and_on_any_devices(tmp_path):
    pytest.importorskip("sklearn", reason="pip install scikit-learn")
    code = program()
    assert code.count('devices="auto"') == 1
    printed = [
        run(code.replace('"auto"', devices), tmp_path)
        for devices in ('"auto"', '"auto"', "1", "2", "3")
    ]
    assert [line[:6] for line in printed[0]] == ["epoch ", "epoch ", printed[0][2][:6]]
    assert re.fullmatch("[0-9a-f]{64}", printed[0][2])
    assert printed[1:] == printed[:1] * 4
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    launched = "\n".join(run(code, tmp_path, *torchrun))
    assert [launched.count(line) for line in printed[0]] == [2, 2, 2]  # each process prints


@pytest.mark.slow  # a fresh interpreter
def test_the_plain_loop_runs_and_differs_by_the_loop_alone(tmp_path):
    pytest.importorskip("sklearn", reason="pip install scikit-learn")
    plain, ours = program("-", 1), program("+", 1)
    assert "evenstep.Trainer" not in plain
    assert plain.split("\nfor epoch")[0] == ours.replace("import evenstep\n", "").split("\nwith")[0]
    assert run(plain, tmp_path)[0].startswith("epoch 1: loss ")


def test_it_is_read_in_a_few_minutes():
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) <= 700


def test_what_it_points_to_exists():
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)]+)\)", README)]
    assert len(targets) > 10
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_its_figures_are_those_of_the_benchmarks():
    measured = re.findall(
        r"^\| (?:two devices over DDP|the same, DDP),? .*", BENCHMARKS, re.MULTILINE
    )
    medians = {row.split("|")[3].strip() for row in measured}
    figures = re.findall(r"([\d.]+)×", README)
    assert len(figures) >= 4
    assert set(figures) <= medians
