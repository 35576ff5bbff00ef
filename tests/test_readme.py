"""The README: its program runs, gives what it promises, and the page stays short and true."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
BENCHMARKS = "\n".join(
    (ROOT / "docs" / f"benchmarks_{part}.md").read_text(encoding="utf-8")
    for part in ("training", "steps")
)

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
    code = program()
    assert code.count("loss_function, seed=0") == 1
    given = ["", "", ", devices=1", ", devices=2", ', devices=["cpu:1", "cpu:0", "cpu:2"]']
    printed = [
        run(code.replace("function, seed", f"function{devices}, seed"), tmp_path)
        for devices in given
    ]
    assert [line[:6] for line in printed[0]] == ["epoch ", "epoch ", printed[0][2][:6]]
    assert re.fullmatch("[0-9a-f]{64}", printed[0][2])
    assert printed[1:] == printed[:1] * 4
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    launched = "\n".join(run(code, tmp_path, *torchrun))
    assert [launched.count(line) for line in printed[0]] == [2, 2, 2]  # each process prints


@pytest.mark.slow
def test_the_demo_has_the_fingerprint_that_is_shown(tmp_path):
    """On every processor: the demo computes in portable arithmetic."""
    (command,) = re.findall(r"^DEMO := \$\(BIN\)/evenstep (.*) \\$", MAKEFILE, re.MULTILINE)
    given = [*command.split(), "--arithmetic", "portable", "--json", tmp_path / "demo.json"]
    subprocess.run([sys.executable, "-m", "evenstep", *given], check=True, capture_output=True)
    found = json.loads((tmp_path / "demo.json").read_text())["fingerprint"]
    assert f"one fingerprint, {found[:16]}…" in README


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
    overhead = re.findall(
        r"^\| evenstep, 1 device \|.*?\|.*?\| ([\d.]+)×", BENCHMARKS, re.MULTILINE
    )
    medians |= set(overhead)
    figures = re.findall(r"([\d.]+)×", README)
    assert len(figures) >= 4
    assert set(figures) <= medians
